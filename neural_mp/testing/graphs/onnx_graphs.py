"""Seeded ONNX graphs of an op between two kernels, over the attributes that ONNX allows.

Their conversion to INT8 is checked as the runtime fuses them, unfused, and in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.fusion_check import exceeds_rounding
from neural_mp.adaptors.contract import Adaptor
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.kernel_check import compare_ahead
from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.testing.graphs.graph_check import MAX_INT8_NSR, Outcome, Verdict, nsr, outcome_of
from neural_mp.testing.graphs.onnx_ops import EVERYWHERE, ON_IMAGES, Draw, Shape, drawn_simply
from neural_mp.util.pytree import Array, list_float_arrays

OPSETS = (13, 15, 17, 18, 19, 20, 21)
_IR_VERSION = 9
_FATAL = 4


def _draw_convolution(draw: Draw, x: str) -> str:
    channels, axes = draw.shape[1], len(draw.shape) - 2
    groups = draw.one_of(1, 1, channels, *([2] if channels % 2 == 0 else []))
    written = groups * draw.integer(1, 2) if groups > 1 else draw.one_of(4, 8)
    size = draw.one_of(1, 1, 3) if min(draw.shape[2:]) >= 3 else 1
    weight = (written, channels // groups, *[size] * axes)
    numbers: dict[str, Any] = {"group": groups if groups > 1 else None}
    if size > 1:
        numbers["auto_pad"] = draw.one_of(None, "SAME_UPPER", "SAME_LOWER", "VALID")
        if numbers["auto_pad"] is None:
            numbers["pads"] = draw.one_of(None, [1] * 2 * axes, [1, 0] * axes)
        numbers["strides"] = draw.one_of(None, [2] * axes)
        if numbers["strides"] is None and min(draw.shape[2:]) > 5:
            numbers["dilations"] = draw.one_of(None, [2] * axes)
    scale = 1 / np.sqrt(np.prod(weight[1:]))
    bias = [draw.floats(written, scale=0.3)] if draw.one_of(True, False) else []
    return draw.add("Conv", x, draw.floats(*weight, scale=scale), *bias, **numbers)


def _draw_transposed_convolution(draw: Draw, x: str) -> str:
    channels, axes = draw.shape[1], len(draw.shape) - 2
    weight = draw.floats(channels, 4, *[2] * axes, scale=1 / np.sqrt(channels))
    return draw.add("ConvTranspose", x, weight, strides=draw.one_of(None, [2] * axes))


def _draw_product(draw: Draw, x: str) -> str:
    inputs = draw.shape[-1]
    weight = draw.floats(inputs, 8, scale=1 / np.sqrt(inputs))
    product = draw.add("MatMul", x, weight)
    return draw.one_of(product, draw.add("Add", product, draw.floats(8, scale=0.3)))


def _draw_gemm(draw: Draw, x: str) -> str:
    inputs = draw.shape[-1]
    is_transposed = draw.one_of(0, 1)
    shape = (8, inputs) if is_transposed else (inputs, 8)
    weight = draw.floats(*shape, scale=1 / np.sqrt(inputs))
    bias = [draw.floats(8, scale=0.3)] if draw.one_of(True, False) else []
    alpha = draw.one_of(None, 0.5)
    return draw.add("Gemm", x, weight, *bias, transB=is_transposed or None, alpha=alpha)


@dataclass(frozen=True)
class OnnxGraph:
    """A drawn graph with its data.

    Attributes:
        kind: the op between the kernels.
        feeds: name → array of its inputs.
    """

    kind: str
    model: onnx.ModelProto
    feeds: Mapping[str, Array]

    def __str__(self) -> str:
        nodes = (
            f"{node.op_type}({', '.join(node.input)}"
            + "".join(f", {a.name}={helper.get_attribute_value(a)}" for a in node.attribute)
            + ")"
            for node in self.model.graph.node
        )
        return f"opset {self.model.opset_import[0].version}: {' → '.join(nodes)}"


def drawn_graph(seed: int, kind: str | None = None) -> OnnxGraph:
    """Return the graph of a seed: a kernel, an op, another kernel, as far as their shapes fit.

    Graphs that ONNX Runtime refuses in float, with or without optimizations, are drawn again.
    """
    random = np.random.default_rng(seed)
    while True:
        graph = _draw_graph(random, kind)
        if graph is not None:
            return graph


def _draw_graph(random: np.random.Generator, kind: str | None) -> OnnxGraph | None:
    opset = int(random.choice(OPSETS))
    shapes: Sequence[Shape] = ((2, 4, 9, 8), (2, 6, 7, 10), (2, 8, 11), (2, 12), (2, 5, 8))
    first = shapes[int(random.choice(len(shapes), p=(0.35, 0.35, 0.1, 0.1, 0.1)))]
    ops = {**EVERYWHERE, **(ON_IMAGES if len(first) == 4 else {})}
    if kind is None:
        kind = str(random.choice(sorted(ops)))
    elif kind not in ops:
        first, ops = shapes[0], {**EVERYWHERE, **ON_IMAGES}
    draw = Draw(random, first, opset)
    x = _draw_kernel(draw, "x")
    draw.shape = _shape_of(draw, first, x) or ()
    if not draw.shape or min(draw.shape) < 1:
        return None
    between = ops[kind](draw, x)
    draw.shape = _shape_of(draw, first, between) or ()
    if not draw.shape or min(draw.shape) < 1:
        return None
    outputs = [_draw_kernel(draw, between)]
    if random.integers(4) == 0:
        outputs.append(between)
    model = _build_model(draw, first, dict.fromkeys(outputs))
    feeds = {"x": random.normal(size=first).astype(np.float32)}
    try:
        results = _build_session(model).run(None, feeds)
        _build_session(model, ort.GraphOptimizationLevel.ORT_DISABLE_ALL).run(None, feeds)
    except Exception:  # noqa: BLE001 (the bindings raise their own types)
        return None
    is_sound = all(array.size and np.isfinite(array).all() and array.any() for array in results)
    return OnnxGraph(kind.split()[0], model, feeds) if is_sound else None


def _draw_kernel(draw: Draw, x: str) -> str:
    """Add an op with an integer kernel, and maybe an activation."""
    rank = len(draw.shape)
    if draw.one_of(*[False] * 9, True):
        return draw.add("Relu", x)
    if rank == 4 or (rank == 3 and draw.one_of(True, False)):
        kernel = draw.one_of(*[_draw_convolution] * 5, _draw_transposed_convolution)
    elif rank == 2:
        kernel = draw.one_of(_draw_product, _draw_gemm)
    else:
        kernel = _draw_product if rank > 0 else drawn_simply("Relu")
    result = kernel(draw, x)
    return draw.one_of(result, draw.add("Relu", result))


def _shape_of(draw: Draw, first: Shape, name: str) -> Shape | None:
    try:
        (output,) = _build_session(_build_model(draw, first, [name])).run(
            None, {"x": np.ones(first, np.float32)}
        )
    except Exception:  # noqa: BLE001 (the bindings raise their own types)
        return None
    return tuple(output.shape)


def _build_model(draw: Draw, first: Shape, outputs: Any) -> onnx.ModelProto:
    dims = [draw.one_of("n", first[0]) if outputs else first[0], *first[1:]]
    graph = helper.make_graph(
        draw.nodes,
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, dims)],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs],
        [numpy_helper.from_array(array, name) for name, array in draw.constants.items()],
    )
    versions = [helper.make_opsetid("", draw.opset)]
    return helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)


def _build_session(
    model: onnx.ModelProto,
    level: ort.GraphOptimizationLevel = ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.graph_optimization_level = level
    options.log_severity_level, options.intra_op_num_threads = _FATAL, 1
    return ort.InferenceSession(
        model.SerializeToString(), options, providers=["CPUExecutionProvider"]
    )


def compare_ops_of(graphs: Iterable[OnnxGraph]) -> None:
    """Compare the ops of several graphs in one child process, which takes time to start."""
    adaptor = OnnxRuntimeAdaptor()
    checks = (adaptor.load(graph.model).kernel_check for graph in graphs)
    compare_ahead(check for check in checks if check is not None)


def check_graph(
    graph: OnnxGraph,
    machine: Hardware | None = None,
    adaptor: Adaptor[Any] | None = None,
    source: object = None,
) -> Outcome:
    """Convert every eligible op of a graph to INT8 and compare the outputs.

    Args:
        graph: the graph.
        machine: the target; this machine by default.
        adaptor: the adaptor of a runtime that also runs unoptimized; ONNX Runtime's by default.
        source: the graph as the adaptor loads it; an ONNX model by default.
    """
    runtime = adaptor or OnnxRuntimeAdaptor()
    loaded = graph.model if source is None else source
    convert = partial(_check_conversion, adaptor=runtime, source=loaded)
    return outcome_of(graph, convert, machine)


def _check_conversion(
    graph: OnnxGraph, machine: Hardware, adaptor: Adaptor[Any], source: object
) -> Outcome:
    unoptimized = adaptor.unoptimized_run
    if unoptimized is None:
        raise TypeError(f"{adaptor.framework} does not run unoptimized")
    with adaptor.threads(1):
        model = adaptor.load(source, example=graph.feeds)
        space = adaptor.space(model, machine).restricted_to([Precision.INT8])
        observed = adaptor.observe(model, [graph.feeds], space)
        plan = space.resolve(space.fastest_plan())
        converted = adaptor.convert(model, plan, observed, space)
        if converted is model:
            return Outcome(Verdict.UNCHANGED)
        reference = unoptimized.outputs(model, graph.feeds)
        try:
            fused = list_float_arrays(adaptor.predict(converted, graph.feeds))
        except NeuralMPError as error:
            return Outcome(Verdict.NOT_LOADED, one_line(error))
        try:
            unfused = unoptimized.outputs(converted, graph.feeds)
        except NeuralMPError:
            # Some graphs run with optimizations only.
            unfused = fused
    if exceeds_rounding(reference, unfused, fused):
        details = (
            f"NSR {_greatest_nsr(unfused, fused):.2g} fused, "
            f"{_greatest_nsr(reference, unfused):.2g} unfused"
        )
        return Outcome(Verdict.WRONG_FUSION, details)
    if _greatest_nsr(reference, fused) > MAX_INT8_NSR:
        return Outcome(Verdict.WRONG_NUMBERS, f"NSR {_greatest_nsr(reference, fused):.2g}")
    return Outcome(Verdict.RIGHT)


def _greatest_nsr(expected: list[Array], outputs: list[Array]) -> float:
    return max(map(nsr, expected, outputs))
