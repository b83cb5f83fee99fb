"""Nets that nobody has tuned on, drawn by a seed: ours with `runtime=auto`, beside the other tools.

    python -m benchmarks.unseen [--seed 20261129] [--count 20] [--peer ENV/bin/python]
                                [--rounds 15] [--clock cpu] [--only FAMILY…]

Every net is tuned to the noise of NNCF or, without a Python that has NNCF, to an SQNR of 13 dB. All
ways run in turn in one process on one thread: ours, FP32 in three runtimes, INT8 of other tools. By
default, the seed is the date. A stage of `runtimes.py` fails after ten minutes; a net has no result
if ours failed, or the export or the race of all ways.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import tempfile
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.runtime_stages import FLOATS, OURS, PEERS, TORCH
from benchmarks.measurement.tables import make_table
from benchmarks.nets.drawn_nets import FAMILIES, drawn_names
from benchmarks.runtimes import (
    Bench,
    Column,
    column_table,
    decibels,
    run_table,
    speed_with_bound,
)

#: Limit of a stage, in seconds.
MAX_STAGE_SECONDS = 600.0


def net_table(columns: list[Column], failures: list[str]) -> Table:
    """All nets: the runtime of ours, and speeds over eager PyTorch, peers and the best FP32."""
    over = ("over PyTorch", "over the best peer", "over FP32")
    title = "nets drawn by a seed, speed of ours"
    table = make_table(title, "net, batch", "runtime", "SQNR, dB", *over)
    for column in columns:
        speeds = [column.speed_over_best(OURS, peers) for peers in ((TORCH,), PEERS, FLOATS)]
        table.add_row(
            column.title,
            str(column.tuned.get("runtime", "")),
            decibels(column.noise[OURS]),
            *map(speed_with_bound, speeds),
        )
    for name in failures:
        table.add_row(name, "no result")
    return table


def distribution_table(columns: list[Column], failures: list[str]) -> Table:
    """The distribution of speeds over the best peer and the best FP32."""
    headings = ("ours over", "nets", "10th percentile", "median", "surely below 1")
    table = make_table("distribution", *headings)
    for label, peers in {"the best peer": PEERS, "the best FP32": FLOATS}.items():
        ratios = [column.speed_over_best(OURS, peers) for column in columns]
        speeds = [ratio for ratio in ratios if ratio is not None]
        if speeds:
            low, median = np.quantile([speed.value for speed in speeds], (0.1, 0.5))
            below = sum(speed.high < 1 for speed in speeds)
            table.add_row(label, str(len(speeds)), f"{low:.2f}", f"{median:.2f}", str(below))
    table.add_row("nets without a result", str(len(failures)))
    return table


def main() -> None:
    """Draw the nets, race all and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="by default, the date")
    parser.add_argument("--count", type=int, default=20, help="of nets, in turn of all families")
    parser.add_argument(
        "--only", nargs="+", choices=FAMILIES, default=list(FAMILIES), dest="families"
    )
    parser.add_argument("--peer", help="a Python with nncf, torchao, torch, onnx and openvino")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    parser.set_defaults(threads=1, batches=None, only="speed")  # of `runtimes.py`
    options = parser.parse_args()
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console() if sys.stdout.isatty() else Console(width=120)
    bench = Bench(options, console, MAX_STAGE_SECONDS)
    columns: list[Column] = []
    failures: list[str] = []
    for name in drawn_names(options.seed, options.count, options.families):
        with tempfile.TemporaryDirectory() as folder:
            results = [c for c in bench.columns(name, Path(folder)) if OURS in c.seconds]
        columns += results
        failures += [] if results else [name]
        for column in results:
            console.print(column_table(column, options.clock))
        if not results:
            console.print(f"{name}: no result")
    console.print(f"seed {options.seed}")
    tables = net_table(columns, failures), distribution_table(columns, failures)
    console.print(*tables, run_table(columns))


if __name__ == "__main__":
    main()
