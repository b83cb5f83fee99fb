"""Decode and prefill of the stack of layers, by form of its weights."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import onnx
import torch

from benchmarks.decoders import onnx_stack
from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Settings
from benchmarks.decoders.torch_stack import ROWS, cpu_seconds, inputs, ratio, stack
from benchmarks.peers.decoder_peers import peer_speed
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.core.enums import Approach, Capture
from neural_mp.core.hardware import detect
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.space import TuningSpace

HEADINGS = ("runtime", "weights", "over", *(f"{rows} rows" for rows in ROWS))
DECODE, PREFILL = 1, 128


@dataclass
class Ratios:
    """Ratios of times: form → rows → ratio."""

    runtime: str
    over: str
    found: dict[str, dict[int, float]] = field(default_factory=dict)

    def add(self, form: str, rows: int, value: float) -> None:
        """Add a ratio."""
        self.found.setdefault(form, {})[rows] = value

    def best(self, rows: int) -> str:
        """Return the ratio of the fastest form."""
        return f"{max(ratios[rows] for ratios in self.found.values()):.2f}"

    def details(self) -> Iterator[Detail]:
        """Yield a row per form."""
        for form, ratios in self.found.items():
            values = (f"{ratios[rows]:.2f}" for rows in ROWS)
            yield Detail(HEADINGS, (self.runtime, form, self.over, *values))


def torch_forms(space: TuningSpace) -> dict[str, PrecisionPlan]:
    """Name → plan of one form for all layers."""
    space = space.without_data()  # corrections cost no time in a run

    def first(op: str, precision: Precision, computes_in_integers: bool) -> OpConfig | None:
        for config in space.capabilities[op].configs:
            is_dynamic = config.approach is Approach.DYNAMIC
            has_integers = config.activation is not None
            matches = is_dynamic if computes_in_integers else not has_integers
            if config.precision is precision and matches:
                return config
        return None

    forms = {
        "int4, groups": (Precision.INT4, False),
        "int8, weights alone": (Precision.INT8, False),
        "int8, dynamic": (Precision.INT8, True),
        "bf16": (Precision.BF16, False),
    }
    plans = {
        name: PrecisionPlan(
            {op: config for op in space.tunable_ops if (config := first(op, *form)) is not None}
        )
        for name, form in forms.items()
    }
    return {name: plan for name, plan in plans.items() if len(plan)}


def torch_ratios(settings: Settings) -> tuple[Ratios, Ratios]:
    """Return times of FP32 and of BF16 over those of the forms, in PyTorch."""
    net = stack(settings.layers).eval()
    tensors = inputs()
    adaptor = PyTorchAdaptor()
    model = adaptor.load(net, example=tensors[DECODE], capture=Capture.LAYERS)
    results: dict[str, Any] = {
        name: convert_with_plan(net, plan, inputs=tensors[DECODE], capture=Capture.LAYERS)
        for name, plan in torch_forms(adaptor.space(model, detect())).items()
    }
    half = stack(settings.layers).eval().bfloat16()
    over_fp32, over_bf16 = Ratios("PyTorch", "FP32"), Ratios("PyTorch", "BF16")
    with torch.no_grad():
        for rows, x in tensors.items():
            low = x.bfloat16()
            calls = [lambda x=x: net(x), lambda x=low: half(x)]  # type: ignore[misc]
            calls += [lambda m=result, x=x: m(x) for result in results.values()]  # type: ignore[misc]
            fp32, bf16, *remaining = cpu_seconds(calls, settings.rounds)
            for name, seconds in zip(results, remaining, strict=True):
                over_fp32.add(name, rows, ratio(fp32, seconds))
                over_bf16.add(name, rows, ratio(bf16, seconds))
    return over_fp32, over_bf16


def graph_rows(settings: Settings) -> dict[str, list[tuple[str, ...]]]:
    """Return runtime → a row per form of the weights, in ONNX Runtime and OpenVINO."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "stack.onnx"
        onnx.save(onnx_stack.Stack().model(settings.layers), path)
        return {
            runtime: list(onnx_stack.rows_of(runtime, path, settings.rounds))
            for runtime in ("onnxrt", "openvino")
        }


def speed(settings: Settings) -> Iterator[Detail | Figure]:
    """Yield the ratios of all runtimes, and those of torchao."""
    graphs = graph_rows(settings)
    for rows in graphs.values():
        yield from (Detail(onnx_stack.HEADINGS, row) for row in rows)
    for goal, rows_per_call in ((Goal.DECODE_ONNX, DECODE), (Goal.PREFILL_ONNX, PREFILL)):
        column = onnx_stack.HEADINGS.index(f"{rows_per_call} rows")
        yield Figure(goal, max((row[column] for row in graphs["onnxrt"]), key=float))
    over_fp32, over_bf16 = torch_ratios(settings)
    yield from over_fp32.details()
    yield from over_bf16.details()
    yield Figure(Goal.DECODE_TORCH, over_fp32.best(DECODE))
    yield Figure(Goal.PREFILL_TORCH, over_fp32.best(PREFILL))
    yield Figure(Goal.OVER_BF16, ", ".join(map(over_bf16.best, ROWS)))
    peers = {over: Ratios("torchao", over) for over in ("FP32", "BF16")}
    for row in peer_speed(settings):
        for over, ratios in peers.items():
            ratios.add("int4, groups of 128", row["rows"], row[over])
    if peers["FP32"].found:
        for ratios in peers.values():
            yield from ratios.details()
        yield Figure(Goal.DECODE_TORCH, peers["FP32"].best(DECODE), is_peer=True)
        yield Figure(Goal.PREFILL_TORCH, peers["FP32"].best(PREFILL), is_peer=True)
        yield Figure(Goal.OVER_BF16, ", ".join(map(peers["BF16"].best, ROWS)), is_peer=True)
