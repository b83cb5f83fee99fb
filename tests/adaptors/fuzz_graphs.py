"""Fuzz conversions to INT8: drawn graphs of an op between kernels, or of families for LiteRT.

    python tests/adaptors/fuzz_graphs.py onnx                         # 1,000 graphs, some minutes
    python tests/adaptors/fuzz_graphs.py tensorflow --count 500
    python tests/adaptors/fuzz_graphs.py onnx --seed 7 --count 1      # one graph
    python tests/adaptors/fuzz_graphs.py onnx --kind AveragePool
    PYTHONPATH=tests python tests/adaptors/fuzz_graphs.py litert --kind attention

Every graph is converted in this process and run as the runtime fuses it, beside the same graph
unfused (ONNX Runtime), a float simulation of its quantization (TensorFlow) or a plain interpreter
(LiteRT, for several plans), and in FP32. The table lists each failure; the exit code is 1 if there
is any.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from typing import Any

from rich.console import Console
from rich.progress import track
from rich.table import Table

from neural_mp.testing.graphs.graph_check import Outcome

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("framework", choices=("onnx", "tensorflow", "litert"))
    parser.add_argument("--seed", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--count", type=int, default=1000, help="number of graphs")
    parser.add_argument("--kind", help="op between the kernels; by default, all")
    return parser.parse_args()


def _outcomes(options: argparse.Namespace) -> dict[int, tuple[Any, Outcome]]:
    """Return seed → graph and outcome of its conversion."""
    seeds = range(options.seed, options.seed + options.count)
    if options.framework == "onnx":
        from neural_mp.testing.graphs.onnx_graphs import check_graph, compare_ops_of, drawn_graph

        graphs = {seed: drawn_graph(seed, options.kind) for seed in track(seeds, "Drawing")}
        compare_ops_of(track(list(graphs.values()), "Loading"))
        converting = track(graphs.items(), "Converting")
        return {seed: (graph, check_graph(graph)) for seed, graph in converting}
    outcomes: dict[int, tuple[Any, Outcome]] = {}
    if options.framework == "litert":
        from litert_drawn_nets import draw_net
        from litert_net_check import check_net

        for seed in track(seeds, "Converting"):
            net = draw_net(seed, options.kind)
            outcomes[seed] = net, check_net(net)
        return outcomes
    from neural_mp.testing.graphs import tensorflow_graphs

    for seed in track(seeds, "Converting"):
        drawn = tensorflow_graphs.drawn_graph(seed, options.kind)
        outcomes[seed] = drawn, tensorflow_graphs.check_graph(drawn)
    return outcomes


def main() -> int:
    """Check the graphs; return the exit code."""
    started = time.process_time()
    outcomes = _outcomes(_arguments())
    table = Table("seed", "op", "verdict", "graph", "details")
    for seed, (graph, outcome) in outcomes.items():
        if outcome.is_failure:
            verdict = outcome.verdict.value
            table.add_row(str(seed), graph.kind, verdict, str(graph), outcome.details)
    console = Console()
    if table.row_count:
        console.print(table)
    verdicts = Counter(outcome.verdict.value for _, outcome in outcomes.values())
    summary = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    console.print(f"{summary}; {time.process_time() - started:.0f} CPU seconds here")
    return 1 if table.row_count else 0


if __name__ == "__main__":
    sys.exit(main())
