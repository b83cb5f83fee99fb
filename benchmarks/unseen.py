"""Nets that nobody has tuned on, drawn by a seed: ours with `runtime=auto`, beside the other tools.

    python -m benchmarks.unseen [--seed 20261129] [--count 20] [--peer ENV/bin/python]
                                [--rounds 15] [--clock cpu] [--only FAMILY…]

Every net is tuned to the noise of NNCF or, without a Python that has NNCF, to an SQNR of 13 dB. All
ways run in turn in one process on one thread: ours, FP32 in three runtimes, INT8 of other tools. By
default, the seed is the date. A call of ours that takes longer than ten minutes has not returned.
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
from benchmarks.nets.drawn_nets import FAMILIES, drawn_names
from benchmarks.runtimes import Bench, Column
from neural_mp.profiling import Ratio

MAX_CALL_SECONDS = 600.0


def compared(column: Column, others: tuple[str, ...]) -> Ratio | None:
    """Return the speed of ours over the fastest of others; None if ours or these are missing."""
    best = column.best(others)
    return None if best is None else column.speed(OURS, best)


def net_table(columns: list[Column], missing: list[str]) -> Table:
    """All nets: the runtime of ours, and speeds over eager PyTorch, peers and the best FP32."""
    table = Table(title="nets drawn by a seed, speed of ours")
    table.add_column("net, batch")
    for heading in ("runtime", "SQNR, dB", "over PyTorch", "over the best peer", "over FP32"):
        table.add_column(heading, justify="right")
    for column in columns:
        speeds = [compared(column, others) for others in ((TORCH,), PEERS, FLOATS)]
        table.add_row(
            column.title,
            str(column.tuned.get("runtime", "")),
            f"{-10 * np.log10(max(column.noise[OURS], 1e-16)):.1f}",
            *(
                "" if speed is None else f"{speed.value:.2f} (≥ {speed.low:.2f})"
                for speed in speeds
            ),
        )
    for name in missing:
        table.add_row(name, "no result")
    return table


def distribution_table(columns: list[Column], missing: list[str]) -> Table:
    """The distribution of speeds over the best peer and the best FP32."""
    table = Table(title="distribution")
    for heading in ("ours over", "nets", "10th percentile", "median", "surely below 1"):
        table.add_column(heading, justify="right")
    for label, others in {"the best peer": PEERS, "the best FP32": FLOATS}.items():
        speeds = [speed for column in columns if (speed := compared(column, others)) is not None]
        if speeds:
            low, median = np.quantile([speed.value for speed in speeds], (0.1, 0.5))
            below = sum(speed.high < 1 for speed in speeds)
            table.add_row(label, str(len(speeds)), f"{low:.2f}", f"{median:.2f}", str(below))
    table.add_row("calls without a result", str(len(missing)))
    return table


def main() -> None:
    """Draw the nets, race all and print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    today = int(datetime.date.today().strftime("%Y%m%d"))
    parser.add_argument("--seed", type=int, default=today, help="by default, the date")
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--only", nargs="*", choices=FAMILIES, help="families")
    parser.add_argument("--peer", help="a Python with nncf, torchao, torch, onnx and openvino")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--clock", choices=("wall", "cpu"), default="cpu")
    options = parser.parse_args()
    options.threads, options.batches, options.only_families = 1, None, options.only
    options.only = "speed"
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    console = Console() if sys.stdout.isatty() else Console(width=120)
    bench = Bench(options, console, MAX_CALL_SECONDS)
    columns: list[Column] = []
    missing: list[str] = []
    for name in drawn_names(options.seed, options.count):
        if options.only_families and name.split(".")[0] not in options.only_families:
            continue
        with tempfile.TemporaryDirectory() as folder:
            raced = [c for c in bench.columns(name, Path(folder)) if OURS in c.seconds]
        columns += raced
        missing += [] if raced else [name]
        console.print(f"{name}: {'raced' if raced else 'no result'}")
    console.print(f"seed {options.seed}")
    console.print(net_table(columns, missing), distribution_table(columns, missing))


if __name__ == "__main__":
    main()
