"""Four-list painting: seconds for graphs of growing size, chains with branches and loops.

python -m benchmarks.painting [--sizes 1000,10000,100000]
"""

from __future__ import annotations

import argparse
import random
import time

from rich.console import Console
from rich.table import Table

from neural_mp.amp import FourLists, graph_of, paint
from neural_mp.core.enums import RuleSet
from neural_mp.core.graph import OpGraph

LISTS = FourLists(*(frozenset({word}) for word in "ADIC"))


def graph(size: int) -> OpGraph:
    """Ops of all lists, each behind the one before; every third has a branch, some a loop."""
    draw = random.Random(0)
    triples = []
    for index in range(size):
        reads = [f"o{index - 1}" if index else "x"]
        if index and index % 3 == 0:
            reads.append(f"o{draw.randrange(index)}")
        if index % 100 == 0 and index + 50 < size:
            reads.append(f"o{index + 50}")
        triples.append((f"o{index}", draw.choice("ADIIICCCN"), reads))
    return graph_of(triples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="1000,10000,100000")
    sizes = [int(size) for size in parser.parse_args().sizes.split(",")]
    table = Table(title="Painting, seconds (microseconds an op)")
    for heading in ("ops", *RuleSet):
        table.add_column(heading, justify="right")
    for size in sizes:
        ops_graph = graph(size)
        cells = []
        for rules in RuleSet:
            start = time.perf_counter()
            paint(ops_graph, LISTS, rules)
            seconds = time.perf_counter() - start
            cells.append(f"{seconds:.3f} ({seconds / size * 1e6:.1f})")
        table.add_row(f"{size:,}", *cells)
    Console().print(table)


if __name__ == "__main__":
    main()
