"""Seeded TensorFlow graphs of an op between two kernels, over the attributes that the op allows.

Their conversion to INT8 is checked against a float simulation of the quantization.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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
from neural_mp.testing.graphs.tensorflow_ops import EVERYWHERE, ON_IMAGES, Draw, drawn_kernel
from neural_mp.util.pytree import Array

SAMPLES = 3
#: Attributes that an op refuses together are drawn again, at most so often.
_MOST_DRAWS = 50
#: Sizes of tensors between the kernels.
_MOST_ELEMENTS = 1 << 15


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
