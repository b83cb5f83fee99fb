"""ResNet-50 and BERT-base on PyTorch: speed, seconds and memory to convert, fidelity.

    python benchmarks/pytorch.py [--models resnet50,bert] [--batches 1,16]

Ratios of medians of runs taken in turn; absolute times of a shared machine mean little. Where a
C++ compiler is there, compiled models stand beside the eager ones; where torchao is there, its
PT2E path too. Seconds and memory to convert are taken in a process of their own each.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from models import pt2e
from models.bert import bert_base
from models.resnet50 import resnet50
from rich.console import Console
from rich.table import Table
from torch import nn

from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.hardware import detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.profiling import interleaved_medians, peak_growth

SAMPLES = 32
Inputs = tuple[torch.Tensor, ...]


def images(batch: int) -> Inputs:
    return (torch.randn(batch, 3, 224, 224, generator=torch.Generator().manual_seed(0)),)


def sentences(batch: int) -> Inputs:
    draw = torch.Generator().manual_seed(0)
    return torch.randint(0, 30000, (batch, 128), generator=draw), torch.ones(batch, 128).long()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int], Inputs]]] = {
    "resnet50": (resnet50, images),
    "bert": (bert_base, sentences),
}


def split(inputs: Inputs, size: int) -> list[Inputs]:
    return list(zip(*(tensor.split(size) for tensor in inputs), strict=True))


@dataclass
class Ours:
    """A model captured, calibrated, and converted to one precision."""

    name: str
    precision: Precision = Precision.INT8

    def __post_init__(self) -> None:
        build, inputs = MODELS[self.name]
        calibration = split(inputs(SAMPLES), 8)
        self.seconds: dict[str, float] = {}
        net = build()
        self.adaptor = adaptor_for(net)
        with self.clock("capture"):
            model = self.adaptor.load(net, example=calibration[0])
            space = self.adaptor.space(model, detect())
        with self.clock("calibrate"):
            observed = self.adaptor.observe(model, calibration, space)
        plan = {op: space.capabilities[op].config(self.precision) or FP32 for op in space.decided}
        with self.clock("convert"):
            self.held = self.adaptor.convert(
                model, space.resolve(PrecisionPlan(plan)), observed, space
            )

    @contextmanager
    def clock(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[name] = time.perf_counter() - start


def theirs(name: str, batch: int) -> nn.Module:
    build, inputs = MODELS[name]
    return pt2e.converted(
        build(), split(inputs(max(SAMPLES, batch)), batch)[: SAMPLES // batch or 1]
    )


def cost(way: str, name: str) -> dict[str, float]:
    """Seconds and growth of memory of one conversion, run in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--cost", way, "--models", name],
        capture_output=True,
        text=True,
        check=True,
    )
    return dict(json.loads(done.stdout.splitlines()[-1]))


def print_cost(way: str, name: str) -> None:
    start = time.perf_counter()
    seconds: dict[str, float] = {}

    def run() -> None:
        if way == "ours":
            seconds.update(Ours(name).seconds)
        else:
            theirs(name, 8)

    growth = peak_growth(run)
    print(json.dumps({**seconds, "all": time.perf_counter() - start, "megabytes": growth / 1e6}))


def decibels(reference: torch.Tensor, given: torch.Tensor) -> float:
    noise = (reference - given).norm().clamp_min(1e-12)
    return float(20 * torch.log10(reference.norm() / noise))


def frozen(module: nn.Module) -> Callable[..., Any]:
    """A compiled module; its weights are frozen, as all of these gain by it."""
    from torch._inductor import config

    compiled = torch.compile(module)

    def run(*inputs: torch.Tensor) -> Any:
        with config.patch(freezing=True):
            return compiled(*inputs)

    return run


def contenders(
    name: str, batch: int, int8: Ours, bf16: Ours | None
) -> Iterator[tuple[str, Callable[..., Any]]]:
    compiler = shutil.which("g++") or shutil.which("clang++")
    net = MODELS[name][0]()
    yield "FP32 eager", net
    yield "INT8, no compiler", int8.adaptor.native(int8.held)
    if bf16 is not None:
        yield "BF16, no compiler", bf16.adaptor.native(bf16.held)
    if compiler:
        yield "FP32 compiled", frozen(net)
        yield "INT8 compiled", int8.adaptor.compiled(int8.held)
    if compiler and find_spec("torchao"):
        yield "torchao PT2E compiled", frozen(theirs(name, batch))


def compare(name: str, batches: list[int], iterations: int, console: Console) -> None:
    int8 = Ours(name)
    able = detect().support(Precision.BF16).available
    bf16 = Ours(name, Precision.BF16) if able else None
    for batch in batches:
        inputs = MODELS[name][1](batch)
        named = dict(contenders(name, batch, int8, bf16))
        runs = [partial(run, *inputs) for run in named.values()]
        with torch.no_grad():
            results = [run() for run in runs]
            medians = interleaved_medians(runs, warmup=2, iterations=iterations)
        table = Table(title=f"{name}, batch {batch}, {torch.get_num_threads()} threads")
        for heading in ("", "ms", "× of eager FP32", "SQNR, dB"):
            table.add_column(heading, justify="right" if heading else "left")
        for label, median, result in zip(named, medians, results, strict=True):
            table.add_row(
                label,
                f"{median * 1e3:.1f}",
                f"{medians[0] / median:.2f}",
                "" if result is results[0] else f"{decibels(results[0], result):.1f}",
            )
        console.print(table)
    for label, one in (("INT8", int8), ("BF16", bf16)):
        if one is not None:
            counts = one.adaptor.conversion_counts(one.held)
            console.print(f"{label}: {one.adaptor.size(one.held) / 1e6:.0f} MB, {counts}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--batches", default="1,16", help="batch sizes to time")
    parser.add_argument("--iterations", type=int, default=11)
    parser.add_argument("--cost", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        print_cost(options.cost, options.models)
        return
    console = Console(width=100)
    for name in options.models.split(","):
        compare(
            name, [int(size) for size in options.batches.split(",")], options.iterations, console
        )
        ways = ["ours", *(["theirs"] if find_spec("torchao") else [])]
        table = Table(title=f"{name}: to convert to INT8, {SAMPLES} samples")
        for heading in ("", "seconds", "of which", "memory grew by, MB"):
            table.add_column(heading)
        for way in ways:
            taken = cost(way, name)
            parts = {k: v for k, v in taken.items() if k not in ("all", "megabytes")}
            words = ", ".join(f"{part} {seconds:.1f}" for part, seconds in parts.items())
            label = "neural-mp" if way == "ours" else "torchao PT2E, before its compilation"
            table.add_row(label, f"{taken['all']:.1f}", words, f"{taken['megabytes']:.0f}")
        console.print(table)


if __name__ == "__main__":
    main()
