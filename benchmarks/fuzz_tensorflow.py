"""Fuzz conversions to INT8 for TensorFlow: drawn graphs of an op between two kernels.

    python benchmarks/fuzz_tensorflow.py                       # 500 graphs, some minutes
    python benchmarks/fuzz_tensorflow.py --seed 7 --count 1    # one graph
    python benchmarks/fuzz_tensorflow.py --kind AvgPool

Every graph is converted in this process and run as TensorFlow fuses it, beside a float simulation
of the same quantization and FP32. The table lists each failure; the exit code is 1 if there is any.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Beside this file lies `tensorflow.py`, which is not the package.
sys.path.remove(str(Path(__file__).resolve().parent))
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import argparse
import time
from collections import Counter

from rich.console import Console
from rich.progress import track
from rich.table import Table

from neural_mp.testing.tensorflow_graph_check import Finding, checked
from neural_mp.testing.tensorflow_graphs import drawn_graph


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="seed of the first graph")
    parser.add_argument("--count", type=int, default=500, help="number of graphs")
    parser.add_argument("--kind", help="op between the kernels; by default, all")
    return parser.parse_args()


def _table(failures: dict[int, Finding]) -> Table:
    table = Table("seed", "op", "verdict", "graph", "details")
    for seed, found in failures.items():
        kind, verdict = found.graph.kind, found.verdict.value
        table.add_row(str(seed), kind, verdict, str(found.graph), found.words)
    return table


def main() -> int:
    """Check the graphs; return the exit code."""
    given, started = _arguments(), time.process_time()
    seeds = range(given.seed, given.seed + given.count)
    findings = {seed: checked(drawn_graph(seed, given.kind)) for seed in track(seeds, "Converting")}
    failures = {seed: found for seed, found in findings.items() if found.is_failure}
    console = Console()
    if failures:
        console.print(_table(failures))
    verdicts = Counter(found.verdict.value for found in findings.values())
    counted = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    console.print(f"{counted}; {time.process_time() - started:.0f} CPU seconds here")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
