"""Seeded ONNX graphs of an op between two kernels, over the attributes that ONNX allows.

Their conversion to INT8 is checked as the runtime fuses them, unfused, and in FP32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
from neural_mp.util.pytree import Array, list_float_arrays

Shape = tuple[int, ...]
OPSETS = (13, 15, 17, 18, 19, 20, 21)
_IR_VERSION = 9
_FATAL = 4


@dataclass
class Draw:
    """A graph being drawn.

    Attributes:
        random: the source of choices.
        shape: the shape of the value that the next op reads.
        opset: the version of the operators.
    """

    random: np.random.Generator
    shape: Shape
    opset: int
    nodes: list[onnx.NodeProto] = field(default_factory=list)
    constants: dict[str, Array] = field(default_factory=dict)

    def one_of(self, *choices: Any) -> Any:
        """Return one of some choices."""
        return choices[int(self.random.integers(len(choices)))]

    def integer(self, low: int, high: int) -> int:
        """Return an integer between bounds, both included."""
        return int(self.random.integers(low, high + 1))

    def axis(self, least: int = 0) -> int:
        """Return an axis, counted from either end."""
        axis = self.integer(least, len(self.shape) - 1)
        return self.one_of(axis, axis - len(self.shape))

    def constant(self, value: Any, dtype: type = np.int64) -> str:
        """Add a constant and return its name."""
        name = f"k{len(self.constants)}"
        self.constants[name] = np.asarray(value, dtype)
        return name

    def floats(self, *shape: int, scale: float = 1.0) -> str:
        """Add random floats and return their name."""
        return self.constant(self.random.normal(0, scale, shape), np.float32)

    def add(self, kind: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return its first result."""
        defined = {name: value for name, value in attributes.items() if value is not None}
        stem = f"v{len(self.nodes)}"
        names = [stem, *(f"{stem}_{index}" for index in range(1, outputs))]
        self.nodes.append(helper.make_node(kind, inputs, names, name=stem, **defined))
        return stem


Op = Callable[[Draw, str], str]


def _draw_pool(kind: str, draw: Draw, x: str) -> str:
    axes = len(draw.shape) - 2
    window = [draw.integer(1, 3) for _ in range(axes)]
    numbers: dict[str, Any] = {"kernel_shape": window}
    numbers["strides"] = draw.one_of(None, [draw.integer(1, 3) for _ in range(axes)])
    numbers["ceil_mode"] = draw.one_of(None, 0, 1)
    numbers["auto_pad"] = draw.one_of(None, None, "VALID", "SAME_UPPER", "SAME_LOWER")
    if numbers["auto_pad"] is None:
        pads = [draw.integer(0, size - 1) for size in window * 2]
        numbers["pads"] = draw.one_of(None, pads)
    if kind == "AveragePool":
        numbers["count_include_pad"] = draw.one_of(None, 0, 1)
    if kind == "LpPool":
        numbers["ceil_mode"] = numbers["ceil_mode"] if draw.opset >= 18 else None
        numbers["p"] = draw.one_of(None, 1, 2)
    newest = {"MaxPool": 10, "AveragePool": 19, "LpPool": 18}[kind]
    if draw.opset >= newest:
        numbers["dilations"] = draw.one_of(None, [1] * axes, [draw.integer(1, 2)] * axes)
    return draw.add(kind, x, **numbers)


def _draw_concat(draw: Draw, x: str) -> str:
    operand = draw.one_of(x, draw.add("Relu", x), draw.add("Neg", x))
    return draw.add("Concat", *draw.one_of((x, operand), (operand, x, x)), axis=draw.axis())


def _draw_arithmetic(kind: str, draw: Draw, x: str) -> str:
    small = [draw.one_of(1, size) for size in draw.shape[draw.integer(0, 1) :]]
    pooled = draw.add("ReduceMax", x, keepdims=1)
    operand = draw.one_of(x, draw.add("Sigmoid", x), pooled, draw.floats(*small))
    return draw.add(kind, *draw.one_of((x, operand), (operand, x)))


def _draw_pad(draw: Draw, x: str) -> str:
    rank = len(draw.shape)
    mode = draw.one_of("constant", "reflect", "edge", *(["wrap"] if draw.opset >= 19 else []))
    least = -1 if mode == "constant" else 0
    if draw.opset >= 18 and draw.one_of(True, False):
        axes = sorted({draw.integer(0, rank - 1) for _ in range(2)})
        pads = draw.constant([draw.integer(least, 2) for _ in range(2 * len(axes))])
        named = draw.constant([draw.one_of(axis, axis - rank) for axis in axes])
        value = draw.constant(draw.one_of(0, 0.5), np.float32) if mode == "constant" else ""
        return draw.add("Pad", x, pads, value, named, mode=mode)
    pads = draw.constant([draw.integer(least, 2) if i % rank > 1 else 0 for i in range(2 * rank)])
    values = [draw.constant(draw.one_of(0, -0.5), np.float32)] if mode == "constant" else []
    return draw.add("Pad", x, pads, *draw.one_of([], values), mode=mode)


def _draw_resize(draw: Draw, x: str) -> str:
    rank = len(draw.shape)
    numbers: dict[str, Any] = {"mode": draw.one_of("nearest", "linear", "cubic")}
    transforms = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    transforms += ["half_pixel_symmetric"] if draw.opset >= 19 else []
    numbers["coordinate_transformation_mode"] = draw.one_of(None, *transforms)
    if numbers["mode"] == "nearest":
        rounds = ("floor", "ceil", "round_prefer_floor", "round_prefer_ceil")
        numbers["nearest_mode"] = draw.one_of(None, *rounds)
    else:
        numbers["exclude_outside"] = draw.one_of(None, 0, 1) if numbers["mode"] == "cubic" else None
        if draw.opset >= 18:
            numbers["antialias"] = draw.one_of(None, 0, 1)
    scales = [draw.one_of(0.5, 1.0, 1.5, 2.0) for _ in range(rank - 2)]
    if draw.opset >= 18 and draw.one_of(True, False):
        numbers["axes"] = list(range(2, rank))
    else:
        scales = [1.0, 1.0, *scales]
    if draw.one_of(True, False):
        return draw.add("Resize", x, "", draw.constant(scales, np.float32), **numbers)
    sizes = [
        max(1, int(size * by)) for size, by in zip(draw.shape[-len(scales) :], scales, strict=True)
    ]
    return draw.add("Resize", x, "", "", draw.constant(sizes), **numbers)


def _draw_slice(draw: Draw, x: str) -> str:
    axis = draw.axis()
    size = draw.shape[axis]
    start, step = draw.integer(0, size - 1), draw.one_of(1, 1, 2)
    if draw.one_of(True, False, False):
        bounds = (size - 1, -size - 1, -step)
    else:
        bounds = (draw.one_of(start, start - size), draw.one_of(size, 1000), step)
    first, last, by = (draw.constant([bound]) for bound in bounds)
    return draw.add("Slice", x, first, last, draw.constant([axis]), by)


def _draw_split(draw: Draw, x: str) -> str:
    axis = draw.axis(1)
    size = draw.shape[axis]
    parts = draw.integer(1, size - 1) if size > 1 else 0
    if not parts:
        return draw.add("Identity", x)
    sizes = draw.constant([parts, size - parts])
    first = draw.add("Split", x, sizes, outputs=2, axis=axis)
    return draw.one_of(first, f"{first}_1")


def _draw_reshape(draw: Draw, x: str) -> str:
    rank = len(draw.shape)
    if rank < 4:
        shapes = [[0, -1], [-1, draw.shape[-1]]]
    else:
        channels = draw.shape[1]
        shapes = [[0, -1], [0, 0, -1], [0, channels // 2, 2, *draw.shape[2:]], [0, 0, -1, 1]]
    return draw.add("Reshape", x, draw.constant(draw.one_of(*shapes)))


def _draw_transpose(draw: Draw, x: str) -> str:
    rank = len(draw.shape)
    order = [0, *(1 + int(axis) for axis in draw.random.permutation(rank - 1))]
    return draw.add("Transpose", x, perm=draw.one_of(order, order, list(range(rank))[::-1]))


def _draw_squeeze(draw: Draw, x: str) -> str:
    axis = draw.axis(1)
    first = draw.add("Slice", x, *(draw.constant([n]) for n in (0, 1, axis)))
    return draw.add("Squeeze", first, draw.constant([axis]))


def _draw_unsqueeze(draw: Draw, x: str) -> str:
    axis = draw.integer(1, len(draw.shape))
    wide = draw.add("Unsqueeze", x, draw.constant([axis]))
    if draw.one_of(True, False):
        return wide
    return draw.add("ReduceMax", wide, keepdims=1) if draw.opset < 18 else draw.add("Relu", wide)


def _draw_gather(draw: Draw, x: str) -> str:
    axis = draw.axis()
    size = draw.shape[axis]
    indices = [draw.integer(-size, size - 1) for _ in range(draw.integer(1, 4))]
    return draw.add("Gather", x, draw.constant(draw.one_of(indices, indices[0])), axis=axis)


def _draw_reduce(kind: str, draw: Draw, x: str) -> str:
    rank = len(draw.shape)
    axes = draw.one_of(list(range(2, rank)), [draw.axis(1)], [-1], list(range(1, rank)))
    keeps = draw.one_of(None, 0, 1)
    if draw.opset >= 18:
        return draw.add(kind, x, draw.constant(axes or [-1]), keepdims=keeps)
    return draw.add(kind, x, axes=axes or [-1], keepdims=keeps)


def _draw_where(draw: Draw, x: str) -> str:
    # With another constant, rounding of values near the threshold alone exceeds the noise of INT8.
    threshold = draw.constant(0.1, np.float32)
    operand = draw.one_of(threshold, draw.add("Neg", x))
    is_positive = draw.add("Greater", x, threshold)
    return draw.add("Where", is_positive, *draw.one_of((x, operand), (operand, x)))


def _draw_expand(draw: Draw, x: str) -> str:
    wide = [1] * len(draw.shape)
    narrow = draw.add("ReduceMax", x, keepdims=1) if draw.opset < 18 else x
    if narrow != x:
        wide[-1] = draw.integer(1, 4)
        wide[1] = 4
    shape = draw.one_of(wide, [2, *[1] * len(draw.shape)])
    return draw.add("Expand", narrow, draw.constant(shape))


def _draw_tile(draw: Draw, x: str) -> str:
    return draw.add("Tile", x, draw.constant([1, *(draw.integer(1, 2) for _ in draw.shape[1:])]))


def _draw_center_crop(draw: Draw, x: str) -> str:
    if draw.opset < 18:
        return draw.add("Relu", x)
    rank = len(draw.shape)
    axes = draw.one_of(list(range(2, rank)), [-1], [rank - 1])
    sizes = [max(1, draw.shape[axis] + draw.integer(-3, 3)) for axis in axes]
    return draw.add("CenterCropPad", x, draw.constant(sizes), axes=axes)


def _draw_prelu(draw: Draw, x: str) -> str:
    slopes = draw.one_of((), (draw.shape[1], *[1] * (len(draw.shape) - 2)))
    return draw.add("PRelu", x, draw.constant(draw.random.uniform(0, 0.5, slopes), np.float32))


def _draw_space_depth(kind: str, draw: Draw, x: str) -> str:
    if kind == "DepthToSpace":
        return draw.add(kind, x, blocksize=2, mode=draw.one_of(None, "DCR", "CRD"))
    even = draw.add("Slice", x, draw.constant([0, 0]), draw.constant([6, 4]), draw.constant([2, 3]))
    return draw.add(kind, even, blocksize=2)


def drawn_simply(kind: str, **choices: Sequence[Any]) -> Op:
    """Return an op of one input with attributes of some choices."""
    return lambda draw, x: draw.add(
        kind, x, **{key: draw.one_of(*of) for key, of in choices.items()}
    )


#: Ops on tensors of any rank.
EVERYWHERE: Mapping[str, Op] = {
    **{kind: partial(_draw_arithmetic, kind) for kind in ("Add", "Mul", "Sub", "Max")},
    **{kind: partial(_draw_reduce, kind) for kind in ("ReduceMean", "ReduceMax")},
    "Concat": _draw_concat,
    "Slice": _draw_slice,
    "Split": _draw_split,
    "Reshape": _draw_reshape,
    "Transpose": _draw_transpose,
    "Squeeze": _draw_squeeze,
    "Unsqueeze": _draw_unsqueeze,
    "Gather": _draw_gather,
    "Clip": lambda draw, x: draw.add(
        "Clip",
        x,
        draw.one_of("", draw.constant(draw.one_of(-1, 0, 0.2), np.float32)),
        draw.constant(draw.one_of(0.5, 6), np.float32),
    ),
    "Where": _draw_where,
    "Expand": _draw_expand,
    "Tile": _draw_tile,
    "PRelu": _draw_prelu,
    "Flatten": lambda draw, x: draw.add("Flatten", x, axis=draw.one_of(None, 1, 2, -1)),
    "Relu": drawn_simply("Relu"),
    "Sigmoid": drawn_simply("Sigmoid"),
    "Tanh": drawn_simply("Tanh"),
    "HardSigmoid": drawn_simply("HardSigmoid"),
    "LeakyRelu": drawn_simply("LeakyRelu", alpha=(None, 0.1, 0.3)),
    "Elu": drawn_simply("Elu"),
    "Softmax": lambda draw, x: draw.add("Softmax", x, axis=draw.one_of(None, draw.axis(1))),
    "Identity": drawn_simply("Identity"),
    "Abs": drawn_simply("Abs"),
}
#: Ops on images, [samples, channels, ...].
ON_IMAGES: Mapping[str, Op] = {
    **{kind: partial(_draw_pool, kind) for kind in ("AveragePool", "MaxPool", "LpPool")},
    "AveragePool of images": partial(_draw_pool, "AveragePool"),
    "GlobalAveragePool": drawn_simply("GlobalAveragePool"),
    "GlobalMaxPool": drawn_simply("GlobalMaxPool"),
    "Pad": _draw_pad,
    "Resize": _draw_resize,
    "Resize of images": _draw_resize,
    "CenterCropPad": _draw_center_crop,
    "DepthToSpace": partial(_draw_space_depth, "DepthToSpace"),
    "SpaceToDepth": partial(_draw_space_depth, "SpaceToDepth"),
    "InstanceNormalization": lambda draw, x: draw.add(
        "InstanceNormalization",
        x,
        draw.constant(np.linspace(0.5, 1.5, draw.shape[1]), np.float32),
        draw.floats(draw.shape[1]),
    ),
    "LRN": drawn_simply("LRN", size=(1, 3)),
}


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
