"""ResNet-50 and BERT-base on PyTorch: speed, seconds and memory to convert, fidelity.

    python -m benchmarks.convert_pytorch [--models resnet50,bert,easy,chain,residual1,transformer]
                                 [--batches 1,16] [--peer ENV/bin/python] [--rounds 3]
                                 [--only-costs]

Ratios of medians of runs taken in turn; absolute times of a shared machine mean little. Where a
C++ compiler is there, compiled models stand beside the eager ones; where torchao is there, its
PT2E path too. Seconds and memory to convert are taken in a process of their own each, the ways
in turn; with `--peer`, a Python that has Intel Neural Compressor, its INT8 of the same model too.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from benchmarks.measurement.children import ChildError, run_child
from benchmarks.measurement.clock import Clock
from benchmarks.measurement.peak import peak_memory
from benchmarks.nets.torch_nets import LARGE, NETS, Inputs, Net
from benchmarks.peers import pt2e
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.hardware import detect
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.profiling import time_interleaved_medians

#: The ways to convert a model, and what they are called.
WAYS = {
    "ours": "neural-mp",
    "theirs": "torchao PT2E, before its compilation",
    "peer": "Intel Neural Compressor",
}


@dataclass
class Ours:
    """A model captured, calibrated, and converted to one precision."""

    net: nn.Module
    calibration: list[Inputs]
    precision: Precision = Precision.INT8
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.adaptor = adaptor_for(self.net)
        with self.clock.part("capture"):
            model = self.adaptor.load(self.net, example=self.calibration[0])
            space = self.adaptor.space(model, detect())
        with self.clock.part("calibrate"):
            observed = self.adaptor.observe(model, self.calibration, space)
        plan = {
            op: space.capabilities[op].config(self.precision) or FP32 for op in space.tunable_ops
        }
        with self.clock.part("convert"):
            self.held = self.adaptor.convert(
                model, space.resolve(PrecisionPlan(plan)), observed, space
            )


def theirs(net: Net, batch: int) -> nn.Module:
    inputs = net.inputs(max(net.samples, batch))
    batches = list(zip(*(tensor.split(batch) for tensor in inputs), strict=True))
    return pt2e.converted(net.build(), batches[: net.samples // batch or 1])


def cost(tool: str, name: str, peer: str | None) -> dict[str, Any]:
    """What one conversion took, run in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:  # the peer writes files where it stands
        if tool == "peer":
            return dict(run_child("peers.inc_pytorch", name, python=peer, folder=folder))
        return dict(run_child("convert_pytorch", "--cost", tool, "--models", name, folder=folder))


def print_cost(tool: str, name: str) -> None:
    net, calibration = NETS[name].build(), NETS[name].calibration()
    baseline = psutil.Process().memory_info().rss
    if tool == "ours":
        parts = Ours(net, calibration).clock.parts
        cpu, seconds = (sum(durations) for durations in zip(*parts.values(), strict=True))
        parts["all"] = cpu, seconds
    else:
        clock = Clock()
        with clock.part("all"):
            pt2e.converted(net, calibration)
        parts = clock.parts
    memory = (peak_memory() - baseline) / 1e6
    print(json.dumps({"parts": parts, "megabytes": memory}))


def compare_costs(name: str, rounds: int, peer: str | None, console: Console) -> None:
    """What the ways to convert a model take, medians of rounds in which they take turns."""
    tools = ["ours", *(["theirs"] if find_spec("torchao") else []), *(["peer"] if peer else [])]
    costs: dict[str, list[dict[str, Any]]] = {tool: [] for tool in tools}
    for tool in tools * rounds:
        try:
            costs[tool].append(cost(tool, name, peer))
        except ChildError as error:
            console.print(f"{WAYS[tool]} failed: {str(error).splitlines()[-1]}")
    table = Table(title=f"{name}: to convert to INT8, {NETS[name].samples} samples")
    for heading in ("", "CPU seconds", "seconds", "CPU seconds of", "memory grew by, MB"):
        table.add_column(heading)
    for tool, runs in costs.items():
        if not runs:
            continue
        parts = {
            part: [statistics.median(run["parts"][part][kind] for run in runs) for kind in (0, 1)]
            for part in runs[0]["parts"]
        }
        breakdown = ", ".join(
            f"{part} {cpu:.2f}" for part, (cpu, _) in parts.items() if part != "all"
        )
        memory = statistics.median(run["megabytes"] for run in runs)
        cpu, seconds = parts["all"]
        table.add_row(WAYS[tool], f"{cpu:.2f}", f"{seconds:.2f}", breakdown, f"{memory:.0f}")
    console.print(table)


def decibels(reference: torch.Tensor, actual: torch.Tensor) -> float:
    noise = (reference - actual).norm().clamp_min(1e-12)
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
    net = NETS[name].build()
    yield "FP32 eager", net
    yield "INT8, no compiler", int8.adaptor.native(int8.held)
    if bf16 is not None:
        yield "BF16, no compiler", bf16.adaptor.native(bf16.held)
    if compiler:
        yield "FP32 compiled", frozen(net)
        yield "INT8 compiled", int8.adaptor.compiler.compile(int8.held)
    if compiler and find_spec("torchao"):
        yield "torchao PT2E compiled", frozen(theirs(NETS[name], batch))


def compare(name: str, batches: list[int], iterations: int, console: Console) -> None:
    net, calibration = NETS[name].build(), NETS[name].calibration()
    int8 = Ours(net, calibration)
    able = detect().support(Precision.BF16).available
    bf16 = Ours(net, calibration, Precision.BF16) if able else None
    for batch in batches:
        inputs = NETS[name].inputs(batch)
        named = dict(contenders(name, batch, int8, bf16))
        runs = [partial(run, *inputs) for run in named.values()]
        with torch.no_grad():
            results = [run() for run in runs]
            medians = time_interleaved_medians(runs, warmup=2, iterations=iterations)
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
    for label, converted in (("INT8", int8), ("BF16", bf16)):
        if converted is not None:
            counts = converted.held.counts
            console.print(
                f"{label}: {converted.adaptor.weight_bytes(converted.held) / 1e6:.0f} MB, {counts}"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default=",".join(LARGE), help=f"of {', '.join(NETS)}")
    parser.add_argument("--batches", default="1,16", help="batch sizes to time")
    parser.add_argument("--iterations", type=int, default=11)
    parser.add_argument("--peer", help="a Python with neural-compressor and psutil")
    parser.add_argument("--rounds", type=int, default=3, help="conversions of every way")
    parser.add_argument("--only-costs", action="store_true", help="do not time what is converted")
    parser.add_argument("--cost", choices=("ours", "theirs"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cost:
        print_cost(options.cost, options.models)
        return
    console = Console(width=100)
    batches = [int(size) for size in options.batches.split(",")]
    for name in options.models.split(","):
        if not options.only_costs:
            compare(name, batches, options.iterations, console)
        compare_costs(name, options.rounds, options.peer, console)


if __name__ == "__main__":
    main()
