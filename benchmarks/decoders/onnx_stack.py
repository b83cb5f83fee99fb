"""The stack of layers as an ONNX file, and its times by form of the weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from benchmarks.decoders.torch_stack import CACHED, INNER, ROWS, WIDTH, WORDS, cpu_seconds, ratio
from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.adaptors.registry import get_adaptor_named
from neural_mp.core.enums import Approach
from neural_mp.core.hardware import detect
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.space import TuningSpace

HEADINGS = ("runtime", "weights", "size", *(f"{rows} rows" for rows in ROWS), "audit")


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
