"""Memory that calibration takes on PyTorch, over 10, 100 and 1,000 batches.

    python -m benchmarks.calibration_memory [--batches 10,100,1000]

Every number of batches in a process of its own; what is counted is by how much resident memory
grows at most from the second batch on, when the framework has set itself up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.measurement.children import run_child
from benchmarks.nets.resnet50 import resnet50
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.hardware import detect
from neural_mp.profiling import measure_memory_growth

SIZE = 64


def batches(count: int) -> Iterator[torch.Tensor]:
    draw = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield torch.randn(4, 3, SIZE, SIZE, generator=draw)


def growth(count: int) -> int:
    """Bytes by which memory grows while ResNet-50 is calibrated, all four algorithms at once."""
    net = resnet50()
    adaptor = adaptor_for(net)
    model = adaptor.load(net, example=next(batches(1)))
    space = adaptor.space(model, detect())
    adaptor.observe(model, batches(2), space)
    return measure_memory_growth(lambda: adaptor.observe(model, batches(count), space)).total


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batches", default="10,100,1000")
    parser.add_argument("--single", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.single:
        print(json.dumps({"bytes": growth(options.single)}))
        return
    table = Table(title=f"ResNet-50, {SIZE}×{SIZE}: calibration")
    table.add_column("batches", justify="right")
    table.add_column("memory grew by, MB", justify="right")
    for count in options.batches.split(","):
        grown = run_child("calibration_memory", "--single", count)["bytes"]
        table.add_row(count, f"{grown / 1e6:.0f}")
    Console().print(table)


if __name__ == "__main__":
    main()
