"""CPU time and page faults of INT8 models in PyTorch at large batches, whole and in parts.

    OMP_NUM_THREADS=1 python -m benchmarks.large_batches [--models resnet50,…] [--batches 8,32]

The former way computes a batch at once, with glibc's thresholds as they are at the start; the other
is that of results. The thresholds are those of a process: each way runs in processes of its own, in
turn, on a model that was converted once.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console

from benchmarks.measurement.children import run_child
from benchmarks.measurement.tables import make_table
from benchmarks.nets.runtime_nets import CALIBRATED, CALIBRATION, CASES, TIMED
from neural_mp import MixedPrecision, load
from neural_mp.adaptors.pytorch.kernels import batch_parts, direct_calls

WAYS = ("whole", "in parts")
_WARMUP, _CALLS, _PROCESSES = 2, 7, 3
#: More bytes than any op here reads and writes.
_UNLIMITED = 1 << 50


def convert(name: str, folder: Path) -> None:
    """Convert every eligible op of a model to INT8, and save the result."""
    case = CASES[name]
    MixedPrecision(
        model=case.build(),
        calib_dataloader=[_tensors(inputs) for inputs in case.cut(CALIBRATION, CALIBRATED, 8)],
        workspace=folder / "workspace",
        exit_policy={"performance_only": True},
    )().save(folder / name)


def _tensors(arrays: tuple) -> tuple[torch.Tensor, ...]:
    return tuple(map(torch.from_numpy, arrays))


def print_cost(mode: str, name: str, batch: str, folder: str) -> None:
    """Print milliseconds of CPU time and page faults of a call in this process."""
    if mode == "whole":
        batch_parts.MAX_PART_BYTES = _UNLIMITED
        direct_calls.keep_freed_memory = lambda: None
    result = load(Path(folder) / name)
    inputs = _tensors(CASES[name].draw(int(batch), TIMED))
    costs = []
    for _ in range(_WARMUP + _CALLS):
        baseline, started = _faults(), time.process_time()
        result(*inputs)
        costs.append((1e3 * (time.process_time() - started), _faults() - baseline))
    milliseconds, faults = zip(*costs[_WARMUP:], strict=True)
    print(json.dumps([statistics.median(milliseconds), statistics.median(faults)]))


def _faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Print a table with a row for every model and batch size."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--batches", default="8,32")
    parser.add_argument("--cost", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        print_cost(*options.cost)
        return
    headings = ("", *(f"{mode}: ms, page faults" for mode in WAYS), "whole / in parts")
    title = f"INT8 in PyTorch, {torch.get_num_threads()} threads, CPU time"
    table = make_table(title, *headings)
    with tempfile.TemporaryDirectory() as folder:
        for name in options.models.split(","):
            convert(name, Path(folder))
            for batch in options.batches.split(","):
                table.add_row(f"{name}, batch {batch}", *_compared(name, batch, folder))
    Console(width=100).print(table)


def _compared(name: str, batch: str, folder: str) -> list[str]:
    """Return the cells of a row."""
    costs: dict[str, list[list[float]]] = {mode: [] for mode in WAYS}
    for mode in WAYS * _PROCESSES:
        costs[mode].append(run_child("large_batches", "--cost", mode, name, batch, folder))
    medians = [
        [statistics.median(kind) for kind in zip(*costs[mode], strict=True)] for mode in WAYS
    ]
    cells = [f"{milliseconds:.1f}, {faults:,.0f}" for milliseconds, faults in medians]
    return [*cells, f"{medians[0][0] / medians[1][0]:.2f}"]


if __name__ == "__main__":
    main()
