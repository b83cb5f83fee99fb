"""Seeded TensorFlow graphs of an op between two kernels, over the attributes that the op allows.

Their conversion to INT8 is checked against a float simulation of the quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.conversion import choose_quantized_ranges
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, import_runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import get_node_name, plain_name
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import FULL, quantize_weight
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan, limit_to_reached
from neural_mp.testing.graphs.graph_check import MAX_INT8_NSR, Outcome, Verdict, nsr, outcome_of
from neural_mp.util.pytree import Array

ops = tf.raw_ops
SAMPLES = 3
#: Attributes that an op refuses together are drawn again, at most so often.
_MOST_DRAWS = 50
#: Sizes of tensors between the kernels.
_MOST_ELEMENTS = 1 << 15


@dataclass
class Draw:
    """A graph being drawn.

    Attributes:
        random: the source of choices.
    """

    random: np.random.Generator

    def one_of(self, *choices: Any) -> Any:
        """Return one of some choices."""
        return choices[int(self.random.integers(len(choices)))]

    def integer(self, low: int, high: int) -> int:
        """Return an integer between bounds, both included."""
        return int(self.random.integers(low, high + 1))

    def flag(self) -> bool:
        """Return true or false."""
        return bool(self.random.integers(2))

    def axis(self, x: tf.Tensor, least: int = 0) -> int:
        """Return an axis of a tensor, counted from either end."""
        axis = self.integer(least, x.shape.rank - 1)
        return self.one_of(axis, axis - x.shape.rank)

    def floats(self, *shape: int, scale: float = 1.0) -> Array:
        """Return random floats."""
        return self.random.normal(0, scale, shape).astype(np.float32)


Op = Callable[[Draw, tf.Tensor], tf.Tensor]


def _draw_pool(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    rows, columns = draw.integer(1, 4), draw.integer(1, 4)
    steps = [1, draw.integer(1, 3), draw.integer(1, 3), 1]
    options = {"ksize": [1, rows, columns, 1], "strides": steps}
    padding = draw.one_of("SAME", "VALID", *(["EXPLICIT"] if kind == "MaxPool" else []))
    if padding == "EXPLICIT":
        around = [draw.integer(0, size - 1) for size in (rows, rows, columns, columns)]
        return ops.MaxPool(
            input=x, padding=padding, explicit_paddings=[0, 0, *around, 0, 0], **options
        )
    if kind == "MaxPool":
        return ops.MaxPool(input=x, padding=padding, **options)
    return ops.AvgPool(value=x, padding=padding, **options)


def _draw_pad(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    first = draw.one_of(0, 1, 1)
    amounts = [
        [draw.integer(0, 2) if axis >= first else 0 for _ in "ba"] for axis in _axis_range(x)
    ]
    if kind == "MirrorPad":
        amounts[0] = [0, 0]
        return ops.MirrorPad(input=x, paddings=amounts, mode=draw.one_of("REFLECT", "SYMMETRIC"))
    if kind == "Pad":
        return ops.Pad(input=x, paddings=amounts)
    value = draw.one_of(0.0, -0.5, 2.0, -100.0)
    return ops.PadV2(input=x, paddings=amounts, constant_values=value)


def _axis_range(x: tf.Tensor) -> range:
    return range(x.shape.rank)


def _draw_same_shape(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    choices: list[Callable[[], tf.Tensor]] = [
        lambda: x,
        lambda: ops.Relu(features=x),
        lambda: ops.Neg(x=x),
        lambda: ops.Sigmoid(x=x),
        lambda: drawn_kernel(draw, x) if x.shape.rank == 2 else ops.Abs(x=x),
    ]
    if x.shape.rank == 4:
        weight = draw.floats(1, 1, x.shape[-1], x.shape[-1], scale=0.3)
        choices += [lambda: tf.nn.conv2d(x, weight, 1, "SAME")] * 3
    return draw.one_of(*choices)()


def _draw_concat(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    values = [x, _draw_same_shape(draw, x), *([_draw_same_shape(draw, x)] if draw.flag() else [])]
    return ops.ConcatV2(values=values, axis=draw.axis(x))


def _draw_binary(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    broadcast = [draw.one_of(1, x.shape[axis]) for axis in _axis_range(x) if axis]
    reduced = draw.one_of([0], [1], [-1], list(range(1, x.shape.rank)))
    operand = draw.one_of(
        lambda: _draw_same_shape(draw, x),
        lambda: _draw_same_shape(draw, x),
        lambda: tf.constant(draw.floats(*broadcast)),
        lambda: tf.constant(draw.floats(1, *broadcast)),
        lambda: tf.reduce_max(x, reduced, keepdims=True),
    )()
    first, second = draw.one_of((x, operand), (operand, x))
    return getattr(ops, kind)(x=first, y=second)


def _draw_reshape(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    sizes = list(x.shape[1:])
    shapes = [[-1, sizes[-1]], [-1, int(np.prod(sizes))], [-1, *sizes[::-1]], [-1, 2, *sizes]]
    shapes += [[-1, *sizes[:-1], 2, sizes[-1] // 2], [-1, *sizes, 1]]
    shape = draw.one_of(*shapes)
    if draw.flag():
        return ops.Reshape(tensor=x, shape=shape)
    computed = tf.concat([[-1], tf.shape(x)[1:]], 0)
    return ops.Reshape(tensor=ops.Reshape(tensor=x, shape=shape), shape=computed)


def _draw_transpose(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    inner = [1 + int(axis) for axis in draw.random.permutation(x.shape.rank - 1)]
    order = draw.one_of(
        [0, *inner], [0, *inner], [*inner, 0], draw.random.permutation(x.shape.rank)
    )
    return ops.Transpose(x=x, perm=np.array(order, np.int32))


def _draw_slice(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    begin = [0, *(draw.integer(0, x.shape[axis] - 1) for axis in _axis_range(x) if axis)]
    lengths = (draw.integer(1, x.shape[axis] - begin[axis]) for axis in _axis_range(x)[1:])
    size = [-1, *(draw.one_of(-1, length) for length in lengths)]
    return ops.Slice(input=x, begin=begin, size=size)


def _draw_strided_slice(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    index: list[Any] = [draw.one_of(slice(None), slice(None, None, -1), slice(1, None))]
    for axis in _axis_range(x)[1:]:
        length = x.shape[axis]
        position, step = draw.integer(0, length - 1), draw.one_of(1, 1, 2, -1, -2)
        span = slice(None, None, step) if draw.flag() else slice(position, None, step)
        ends = slice(
            draw.one_of(None, -length, 0), draw.one_of(None, length, -1), draw.one_of(1, 2)
        )
        index.append(draw.one_of(span, ends, span, position, tf.newaxis))
    if draw.flag():
        index = [Ellipsis, *index[draw.integer(1, len(index) - 1) :]]
    return x[tuple(index)]


def _draw_resize(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    sizes = [draw.one_of(size, 2 * size, size // 2, draw.integer(1, 9)) for size in x.shape[1:3]]
    options = {"align_corners": draw.flag()}
    if kind != "ResizeArea":
        options["half_pixel_centers"] = not options["align_corners"] and draw.flag()
    return getattr(ops, kind)(images=x, size=sizes, **options)


def _draw_space_depth(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    return getattr(ops, kind)(input=x, block_size=draw.one_of(2, 2, 3, 4))


def _draw_space_to_batch(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    block = [draw.integer(1, 3), draw.integer(1, 3)]
    pads = []
    for size, by in zip(x.shape[1:3], block, strict=True):
        leading = draw.integer(0, 2)
        pads.append([leading, -(size + leading) % by + by * draw.integer(0, 1)])
    return ops.SpaceToBatchND(input=x, block_shape=block, paddings=pads)


def _draw_batch_to_space(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    batches = _draw_space_to_batch(draw, x)
    block = tf.get_static_value(batches.op.inputs[1])
    crops = [[draw.integer(0, 1) for _ in "ba"] for _ in block]
    return ops.BatchToSpaceND(input=batches, block_shape=block, crops=crops)


def _draw_tile(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    return ops.Tile(input=x, multiples=[draw.one_of(1, 1, 2) for _ in _axis_range(x)])


def _draw_gather(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    axis = draw.axis(x, 1)
    positions = [draw.integer(0, x.shape[axis] - 1) for _ in range(draw.integer(1, 4))]
    indices = draw.one_of(positions, positions[0], [positions])
    return ops.GatherV2(params=x, indices=indices, axis=axis)


def _draw_split(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    axis = draw.axis(x, 1)
    length = x.shape[axis]
    if kind == "Split":
        parts = draw.one_of(*(n for n in range(1, length + 1) if length % n == 0))
        pieces = ops.Split(axis=axis, value=x, num_split=parts)
    elif kind == "SplitV":
        first = draw.integer(0, length)
        sizes = draw.one_of([first, length - first], [first, -1])
        pieces = ops.SplitV(value=x, size_splits=sizes, axis=axis, num_split=2)
    else:
        pieces = ops.Unpack(value=x, num=length, axis=axis)
    chosen = draw.one_of(*pieces)
    if draw.flag():
        return chosen
    return ops.ConcatV2(values=[pieces[-1], chosen, pieces[0]], axis=draw.integer(0, 0))


def _draw_reduce(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    axes = draw.one_of([1], [-1], list(range(1, x.shape.rank)), [draw.axis(x, 1)], [1, -1])
    axes = sorted({axis % x.shape.rank for axis in axes})
    return getattr(ops, kind)(input=x, axis=axes, keep_dims=draw.flag())


def _draw_expand(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    wide = ops.ExpandDims(input=x, axis=draw.one_of(1, -1, draw.integer(0, x.shape.rank)))
    return wide if draw.flag() else ops.Relu(features=wide)


def _draw_squeeze(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    axis = draw.axis(x, 1)
    thin = tf.reduce_max(x, axis, keepdims=True)
    return ops.Squeeze(input=thin, axis=[axis])


def _draw_batch_norm(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    width = x.shape[-1]
    values = [draw.floats(width) for _ in range(3)]
    return tf.compat.v1.nn.fused_batch_norm(
        x, *values, np.abs(draw.floats(width)) + 0.5, is_training=False
    )[0]


def _draw_unary(draw: Draw, x: tf.Tensor, kind: str) -> tf.Tensor:
    function: Any = getattr(ops, kind)
    if kind == "LeakyRelu":
        return function(features=x, alpha=draw.one_of(0.0, 0.1, 0.3, 1.0, 1.5))
    name = "features" if kind in ("Relu", "Relu6", "Elu", "Selu", "Softplus") else "x"
    return function(**{name: x})


def _ops_of_kinds(function: Callable[..., tf.Tensor], *kinds: str) -> dict[str, Op]:
    return {kind: partial(function, kind=kind) for kind in kinds}


#: Ops on tensors of any rank from 2 on.
EVERYWHERE: Mapping[str, Op] = {
    **_ops_of_kinds(
        _draw_binary, "AddV2", "Add", "Sub", "Mul", "Maximum", "Minimum", "SquaredDifference"
    ),
    **_ops_of_kinds(_draw_reduce, "Mean", "Max", "Sum"),
    **_ops_of_kinds(_draw_split, "Split", "SplitV", "Unpack"),
    **_ops_of_kinds(
        _draw_unary, "Relu", "Relu6", "LeakyRelu", "Elu", "Sigmoid", "Tanh", "Softplus", "Abs"
    ),
    **_ops_of_kinds(_draw_pad, "Pad", "PadV2", "MirrorPad"),
    "ConcatV2": _draw_concat,
    "Reshape": _draw_reshape,
    "Transpose": _draw_transpose,
    "Slice": _draw_slice,
    "StridedSlice": _draw_strided_slice,
    "Tile": _draw_tile,
    "GatherV2": _draw_gather,
    "ExpandDims": _draw_expand,
    "Squeeze": _draw_squeeze,
    "Pack": lambda draw, x: ops.Pack(
        values=[x, _draw_same_shape(draw, x)], axis=draw.integer(1, x.shape.rank)
    ),
    "BroadcastTo": lambda draw, x: ops.BroadcastTo(
        input=tf.reduce_max(x, draw.axis(x, 1), keepdims=True), shape=tf.shape(x)
    ),
    "SelectV2": lambda draw, x: ops.SelectV2(
        condition=x > 0.1,
        t=x,
        e=draw.one_of(lambda: _draw_same_shape(draw, x), lambda: tf.zeros_like(x))(),
    ),
    "ReverseV2": lambda draw, x: ops.ReverseV2(tensor=x, axis=[draw.axis(x, 1)]),
    "Roll": lambda draw, x: ops.Roll(input=x, shift=draw.integer(-2, 2), axis=draw.axis(x, 1)),
    "Identity": lambda draw, x: ops.Identity(input=x),
}
#: Ops on images, [samples, rows, columns, channels]; pools twice, with most attributes.
ON_IMAGES: Mapping[str, Op] = {
    **_ops_of_kinds(_draw_pool, "MaxPool", "AvgPool"),
    **{
        f"{kind} of images": op
        for kind, op in _ops_of_kinds(_draw_pool, "MaxPool", "AvgPool").items()
    },
    **_ops_of_kinds(
        _draw_resize, "ResizeBilinear", "ResizeNearestNeighbor", "ResizeBicubic", "ResizeArea"
    ),
    **_ops_of_kinds(_draw_space_depth, "SpaceToDepth", "DepthToSpace"),
    "SpaceToBatchND": _draw_space_to_batch,
    "BatchToSpaceND": _draw_batch_to_space,
    "FusedBatchNormV3": _draw_batch_norm,
}


def drawn_kernel(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    """Return the result of a kernel for the rank of a tensor, with a bias and activation or not."""
    if x.shape.rank == 4:
        y = _draw_convolution(draw, x)
    else:
        width, outputs = x.shape[-1], draw.one_of(4, 8, 12)
        weight = draw.floats(width, outputs, scale=width**-0.5)
        if x.shape.rank == 2:
            y = ops.MatMul(a=x, b=weight)
        else:
            y = draw.one_of(
                lambda: ops.BatchMatMulV2(x=x, y=weight), lambda: tf.tensordot(x, weight, 1)
            )()
    if draw.integer(0, 2):
        y = ops.BiasAdd(value=y, bias=draw.floats(y.shape[-1], scale=0.3))
    kind = draw.one_of("Identity", "Identity", "Relu", "Relu6")
    return y if kind == "Identity" else _draw_unary(draw, y, kind)


def _draw_convolution(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    channels, stride = x.shape[-1], draw.one_of(1, 1, 2)
    window = [min(draw.one_of(1, 3, 3, 2), size or 1) for size in x.shape[1:3]]
    padding: Any = draw.one_of("SAME", "VALID", "SAME")
    if draw.integer(0, 2) == 0:
        weight = draw.floats(*window, channels, draw.one_of(1, 1, 2), scale=0.4)
        return tf.nn.depthwise_conv2d(x, weight, [1, stride, stride, 1], padding)
    if draw.integer(0, 3) == 0:
        padding = [[0, 0], [draw.integer(0, 1)] * 2, [draw.integer(0, 1), 1], [0, 0]]
    spread = draw.one_of(1, 1, 2) if stride == 1 else 1
    outputs = draw.one_of(4, 8)
    weight = draw.floats(*window, channels, outputs, scale=(channels * np.prod(window)) ** -0.5)
    return tf.nn.conv2d(x, weight, stride, padding, dilations=spread)


@dataclass(frozen=True)
class TensorFlowGraph:
    """A drawn graph.

    Attributes:
        graph: the nodes, from the placeholder `x` to the output `y`.
        kind: op between the kernels.
        feeds: input of the calibration.
        words: the drawn ops with their attributes.
    """

    graph: tf.Graph
    kind: str
    feeds: Array
    words: str

    def __str__(self) -> str:
        return self.words


def _draw_last_kernel(draw: Draw, x: tf.Tensor) -> tf.Tensor:
    """Return the result of a kernel, on a matrix if a tensor has another rank or unknown sizes."""
    if x.shape.rank == 4 and None not in x.shape[1:]:
        return drawn_kernel(draw, x)
    if x.shape.rank in (2, 3) and x.shape[-1] is not None:
        return drawn_kernel(draw, x)
    width = next((size for size in list(x.shape)[::-1] if size is not None), 1)
    return drawn_kernel(draw, tf.reshape(x, [-1, width]))


def drawn_graph(seed: int, kind: str | None = None) -> TensorFlowGraph:
    """Return a graph of an op, of the given kind or any, between two kernels.

    Raises:
        ValueError: no drawn attributes are valid.
    """
    random = np.random.default_rng(seed)
    kind = kind or str(random.choice([*EVERYWHERE, *ON_IMAGES]))
    for _ in range(_MOST_DRAWS):
        candidate = _draw_graph(Draw(random), kind)
        if candidate is not None:
            return candidate
    raise ValueError(f"{kind} must have valid attributes in {_MOST_DRAWS} draws, got none")


def _draw_graph(draw: Draw, kind: str) -> TensorFlowGraph | None:
    """Return a graph, or None if TensorFlow refuses the drawn attributes."""
    image = [draw.integer(4, 9), draw.integer(4, 9), draw.one_of(3, 4, 8)]
    shape = draw.one_of(image, image, [8]) if kind in EVERYWHERE else image
    if shape is image and kind in EVERYWHERE and draw.integer(0, 4) == 0:
        shape = image[1:]
    feeds = draw.floats(SAMPLES, *shape)
    op = EVERYWHERE.get(kind) or ON_IMAGES[kind]
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, *shape], name="x")
        try:
            y = op(draw, drawn_kernel(draw, x))
            if 0 in y.shape or (y.shape.num_elements() or 0) > _MOST_ELEMENTS:
                return None
            tf.identity(_draw_last_kernel(draw, y), name="y")
            with tf.compat.v1.Session() as session:
                output = session.run("y:0", {"x:0": feeds})
        except (ValueError, tf.errors.OpError):
            return None
    if not output.size or not np.isfinite(output).all():
        return None
    skipped = ("Const", "Placeholder", "Identity")
    operations = [node for node in graph.get_operations() if node.type not in skipped]
    return TensorFlowGraph(graph, kind, feeds, ", ".join(map(_describe_operation, operations)))


def _describe_operation(operation: tf.Operation) -> str:
    parts = [str(tensor.shape.as_list()) for tensor in operation.inputs[:1]]
    integers = (tensor for tensor in operation.inputs[1:] if tensor.dtype.is_integer)
    values = map(tf.get_static_value, integers)
    parts += [str(value.tolist()) for value in values if value is not None]
    for name in ("ksize", "strides", "padding", "explicit_paddings", "dilations", "alpha", "mode"):
        if name in operation.node_def.attr:
            parts.append(f"{name}={operation.get_attr(name)}")
    return f"{operation.type}({', '.join(parts)})"


#: Noise over that of the quantization which a kernel may add: it rounds at other places.
_MAX_RATIO = 1.0
#: NSR that is never too much: steps on either side of a tie, in few elements.
_NEGLIGIBLE_NSR = 1e-4
#: Steps by which tensors are moved so that ties, frequent in averages, are rounded up or down.
_NUDGES = (-1e-3, 1e-3)


def check_graph(graph: TensorFlowGraph, machine: Hardware | None = None) -> Outcome:
    """Convert every eligible op of a graph to INT8 and compare the outputs."""
    return outcome_of(graph, _check_conversion, machine)


def _check_conversion(graph: TensorFlowGraph, machine: Hardware) -> Outcome:
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph.graph, example=graph.feeds)
    space = adaptor.space(model, machine).restricted_to([Precision.INT8])
    observed = adaptor.observe(model, [graph.feeds], space)
    space = limit_to_reached(space, observed.ranges)
    plan = space.resolve(space.fastest_plan())
    converted = adaptor.convert(model, plan, observed, space)
    if converted is model:
        return Outcome(Verdict.UNCHANGED)
    ranges = choose_quantized_ranges(space.graph, plan, observed)
    simulation = simulate_quantization(model, plan, ranges)
    for samples in (len(graph.feeds), len(graph.feeds) - 1):
        feeds = graph.feeds[:samples]
        reference, output = adaptor.predict(model, feeds), adaptor.predict(converted, feeds)
        expected = simulation({"x": feeds})
        noise, allowed = nsr(expected, output), nsr(reference, expected)
        details = f"{samples} samples: NSR {noise:.2g} over the simulation, {allowed:.2g} in it"
        if noise > max(_MAX_RATIO * allowed, _NEGLIGIBLE_NSR):
            ties = [
                simulate_quantization(model, plan, ranges, nudge)({"x": feeds}) for nudge in _NUDGES
            ]
            if noise > _MAX_RATIO * allowed + 2 * nsr(*ties):
                return Outcome(Verdict.WRONG_KERNEL, details)
        if nsr(reference, output) > MAX_INT8_NSR + 2 * allowed:
            return Outcome(Verdict.WRONG_NUMBERS, details)
    return Outcome(Verdict.RIGHT)


class _Simulation:
    """A graph in floats that rounds tensors and weights where a plan quantizes them."""

    def __init__(self, model: TensorFlowModel, output: str, nudge: float) -> None:
        self.graph, self.output, self.nudge = model.graph.copy_graph(), output, nudge

    def round_weight(self, op: str, limit: int) -> None:
        """Round the weight of a layer within ±`limit`."""
        node = self.graph.nodes[op]
        depthwise = node.op == "DepthwiseConv2dNative"
        weight = self.graph.constant_value(node.input[1])
        rounded = quantize_weight(weight, depthwise, limit)
        limits = rounded.limits.reshape(weight.shape[2:] if depthwise else -1)
        value = rounded.integers * (limits / np.float32(FULL))
        constant = self.graph.put_constant(f"{op}/rounded", value.astype(np.float32))
        self.graph.edit_node(op).input[1] = constant

    def round_tensor(self, tensor: str, encoding: QuantParams, readers: Iterable[str]) -> None:
        """Let nodes read a rounded tensor."""
        limits = [
            self.graph.put_constant(f"{tensor}/{bound}", np.float32(value))
            for bound, value in (("low", encoding.low), ("high", encoding.high))
        ]
        step = self.graph.put_constant(f"{tensor}/nudge", np.float32(self.nudge * encoding.scale))
        nudged = self.graph.put_node("AddV2", f"{tensor}/nudged", [tensor, step], T=tf.float32)
        rounded = self.graph.put_node(
            "FakeQuantWithMinMaxVars",
            f"{tensor}/rounded",
            [nudged, *limits],
            num_bits=8,
            narrow_range=False,
        )
        for name in readers:
            edited = self.graph.edit_node(name)
            for position, source in enumerate(edited.input):
                if plain_name(source) == tensor:
                    edited.input[position] = rounded
        if self.output == tensor:
            self.output = rounded

    def __call__(self, feeds: Mapping[str, Array]) -> Array:
        """Return the output."""
        graph = self.graph.prune_unused([self.output], feeds)
        (output,) = Runner(import_runnable(graph.to_graph_def()))(feeds, [self.output])
        return np.asarray(output)


def simulate_quantization(
    model: TensorFlowModel, plan: ResolvedPlan, ranges: Mapping[str, Range], nudge: float = 0.0
) -> _Simulation:
    """Return the simulation of a plan for a model with one output.

    `nudge` moves tensors by a fraction of a step before rounding.
    """
    (output,) = model.signature.output_tensors
    simulation, flow = _Simulation(model, output, nudge), plan.flow
    for op, precision in plan.effective.items():
        if precision is Precision.INT8 and op in model.structure.fusion_groups:
            simulation.round_weight(op, weight_qmax(plan.plan[op].weight))
    members, consumers = model.structure.layer_of, model.graph.find_consumers()
    for tensor, owner in flow.scale_owner.items():
        readers = {name for name, _ in consumers[get_node_name(tensor)]}
        if tensor in flow.int8_outputs:
            simulation.round_tensor(tensor, QuantParams.of(ranges[owner]), readers)
            continue
        integer = {op for op, sources in flow.int8_reads.items() if tensor in sources}
        inside = {name for name in readers if name in integer or members.get(name) in integer}
        previous, simulation.output = simulation.output, ""
        simulation.round_tensor(tensor, QuantParams.of(ranges[owner]), inside)
        simulation.output = previous
    return simulation
