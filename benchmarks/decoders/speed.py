"""Decode and prefill of the stack of layers in PyTorch and as an ONNX file, by form of weights."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

from benchmarks.decoders.goals import Detail, Figure, Goal
from benchmarks.decoders.settings import Settings
from benchmarks.decoders.torch_stack import (
    CACHED,
    INNER,
    ROWS,
    WIDTH,
    WORDS,
    cpu_seconds,
    inputs,
    ratio,
    stack,
)
from benchmarks.peers.decoder_peers import peer_speed
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.pytorch.adaptor import PyTorchAdaptor
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.enums import Approach, Capture
from neural_mp.core.hardware import detect
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.space import TuningSpace

HEADINGS = ("runtime", "weights", "over", *(f"{rows} rows" for rows in ROWS))
DECODE, PREFILL = 1, 128
ONNX_HEADINGS = ("runtime", "weights", "size", *(f"{rows} rows" for rows in ROWS), "audit")


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
        onnx.save(Stack().model(settings.layers), path)
        return {
            runtime: list(rows_of(runtime, path, settings.rounds))
            for runtime in ("onnxrt", "openvino")
        }


def speed(settings: Settings) -> Iterator[Detail | Figure]:
    """Yield the ratios of all runtimes, and those of torchao."""
    graphs = graph_rows(settings)
    for rows in graphs.values():
        yield from (Detail(ONNX_HEADINGS, row) for row in rows)
    for goal, rows_per_call in ((Goal.DECODE_ONNX, DECODE), (Goal.PREFILL_ONNX, PREFILL)):
        column = ONNX_HEADINGS.index(f"{rows_per_call} rows")
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


class Stack:
    """Builds the graph of the layers."""

    def __init__(self) -> None:
        self.random = np.random.default_rng(0)
        self.nodes: list[onnx.NodeProto] = []
        self.weights: list[onnx.TensorProto] = []

    def op(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        name = name or f"{kind}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(kind, inputs, [name], name=name, **attributes))
        return name

    def dense(self, x: str, inputs: int, outputs: int, name: str) -> str:
        weight = self.random.standard_normal((inputs, outputs), np.float32) * inputs**-0.5
        self.weights.append(numpy_helper.from_array(weight, f"{name}.weight"))
        return self.op("MatMul", x, f"{name}.weight", name=name)

    def layer(self, x: str, index: int) -> str:
        q, k, v = (
            self.dense(x, WIDTH, width, f"layers.{index}.{part}")
            for part, width in (("q", WIDTH), ("k", CACHED), ("v", CACHED))
        )
        mixed = self.op("Concat", *[self.op("Mul", k, v)] * (WIDTH // CACHED), axis=-1)
        attended = self.op("Add", q, mixed)
        x = self.op("Add", x, self.dense(attended, WIDTH, WIDTH, f"layers.{index}.o"))
        gate, up = (self.dense(x, WIDTH, INNER, f"layers.{index}.{p}") for p in ("gate", "up"))
        product = self.op("Mul", self.op("Mul", gate, self.op("Sigmoid", gate)), up)
        x = self.op("Add", x, self.dense(product, INNER, WIDTH, f"layers.{index}.down"))
        return self.op("Tanh", x)

    def model(self, layers: int) -> onnx.ModelProto:
        x = "x"
        for index in range(layers):
            x = self.layer(x, index)
        y = self.dense(x, WIDTH, WORDS, "head")
        graph = helper.make_graph(
            self.nodes,
            "stack",
            [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["rows", WIDTH])],
            [helper.make_tensor_value_info(y, TensorProto.FLOAT, ["rows", WORDS])],
            self.weights,
        )
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def forms(space: TuningSpace) -> Iterator[tuple[str, PrecisionPlan]]:
    """Yield the names and plans of the forms that all products support."""
    space = space.without_data()  # corrections cost no time in a run
    products = [op.name for op in space.graph if op.type == "MatMul"]

    def plan(predicate: Callable[[OpConfig], bool]) -> PrecisionPlan:
        configs = {op: filter(predicate, space.capabilities[op].configs) for op in products}
        return PrecisionPlan(
            {op: config for op, cs in configs.items() if (config := next(cs, None))}
        )

    yield "FP32", PrecisionPlan()
    inside = Approach.DYNAMIC
    if all(inside not in space.capabilities[op].int8_approaches for op in products):
        inside = Approach.STATIC
    yield f"INT8, {inside}", plan(lambda c: c.precision is Precision.INT8 and c.approach is inside)
    by_channel = plan(lambda c: c.approach is Approach.WEIGHT_ONLY and c.weight.group_size is None)  # type: ignore[union-attr]
    if by_channel:
        yield "int8, by channel", by_channel
    for dtype, size in (("uint8", 128), ("int4", 128), ("uint4", 128), ("uint4", 32)):
        yield (
            f"{dtype}, groups of {size}",
            plan(
                lambda c, d=dtype, g=size: (  # type: ignore[misc]
                    c.weight is not None and c.weight.dtype == d and c.weight.group_size == g
                )
            ),
        )


def rows_of(runtime: str, path: Path, rounds: int) -> list[tuple[str, ...]]:
    random = np.random.default_rng(1)
    inputs = {rows: {"x": random.standard_normal((rows, WIDTH), np.float32)} for rows in ROWS}
    adaptor = get_adaptor_named(runtime)
    loaded = adaptor.load(str(path), example=inputs[8])
    space = adaptor.space(loaded, detect())
    observations = adaptor.observe(loaded, [inputs[128]], space)
    models = {
        name: convert_with_plan(
            str(path), plan, observations=observations, inputs=inputs[8], framework=runtime
        )
        for name, plan in forms(space)
    }
    ratios: dict[str, list[str]] = {name: [] for name in models}
    for feeds in inputs.values():
        calls = [lambda m=model, x=feeds: m(x) for model in models.values()]  # type: ignore[misc]
        first, *remaining = cpu_seconds(calls, rounds)
        for name, seconds in zip(models, (first, *remaining), strict=True):
            ratios[name].append(f"{ratio(first, seconds):.2f}")
    size = adaptor.weight_bytes(models["FP32"].held)
    table = []
    for name, model in models.items():
        part = model.adaptor.weight_bytes(model.held) / size
        verdict = "holds" if model.audit().holds else "broken"
        table.append((runtime, name, f"{part:.3f}", *ratios[name], verdict))
    return table
