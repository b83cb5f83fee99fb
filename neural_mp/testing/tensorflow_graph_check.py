"""Check of a drawn TensorFlow graph in INT8 against a float simulation of its quantization."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.conversion import quantized_ranges
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import node_of, plain
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import FULL, quantize_weight
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan, reached_by
from neural_mp.testing.graph_check import MAX_INT8_NSR, Outcome, Verdict, nsr, outcome_of
from neural_mp.testing.tensorflow_graphs import TensorFlowGraph
from neural_mp.util.pytree import Array

#: Noise over that of the quantization which a kernel may add: it rounds at other places.
_MAX_RATIO = 1.0
#: NSR that is never too much: steps on either side of a tie, in few elements.
_NEGLIGIBLE_NSR = 1e-4
#: Steps by which tensors are moved so that ties, frequent in averages, are rounded up or down.
_NUDGES = (-1e-3, 1e-3)


def checked(graph: TensorFlowGraph, machine: Hardware | None = None) -> Outcome:
    """Convert every eligible op of a graph to INT8 and compare the outputs."""
    return outcome_of(graph, _check_conversion, machine)


def _check_conversion(graph: TensorFlowGraph, machine: Hardware) -> Outcome:
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph.graph, example=graph.feeds)
    space = adaptor.space(model, machine).restricted_to([Precision.INT8])
    observed = adaptor.observe(model, [graph.feeds], space)
    space = reached_by(space, observed.ranges)
    plan = space.resolve(space.fastest_plan())
    converted = adaptor.convert(model, plan, observed, space)
    if converted is model:
        return Outcome(Verdict.UNCHANGED)
    ranges = quantized_ranges(space.graph, plan, observed)
    simulation = simulated(model, plan, ranges)
    for samples in (len(graph.feeds), len(graph.feeds) - 1):
        feeds = graph.feeds[:samples]
        reference, output = adaptor.predict(model, feeds), adaptor.predict(converted, feeds)
        expected = simulation({"x": feeds})
        noise, allowed = nsr(expected, output), nsr(reference, expected)
        details = f"{samples} samples: NSR {noise:.2g} over the simulation, {allowed:.2g} in it"
        if noise > max(_MAX_RATIO * allowed, _NEGLIGIBLE_NSR):
            ties = [simulated(model, plan, ranges, nudge)({"x": feeds}) for nudge in _NUDGES]
            if noise > _MAX_RATIO * allowed + 2 * nsr(*ties):
                return Outcome(Verdict.WRONG_KERNEL, details)
        if nsr(reference, output) > MAX_INT8_NSR + 2 * allowed:
            return Outcome(Verdict.WRONG_NUMBERS, details)
    return Outcome(Verdict.RIGHT)


class _Simulation:
    """A graph in floats that rounds tensors and weights where a plan quantizes them."""

    def __init__(self, model: TensorFlowModel, output: str, nudge: float) -> None:
        self.graph, self.output, self.nudge = model.graph.copy(), output, nudge

    def round_weight(self, op: str, limit: int) -> None:
        """Round the weight of a layer within ±`limit`."""
        node = self.graph.nodes[op]
        depthwise = node.op == "DepthwiseConv2dNative"
        weight = self.graph.value(node.input[1])
        rounded = quantize_weight(weight, depthwise, limit)
        limits = rounded.limits.reshape(weight.shape[2:] if depthwise else -1)
        value = rounded.integers * (limits / np.float32(FULL))
        constant = self.graph.put_constant(f"{op}/rounded", value.astype(np.float32))
        self.graph.edit(op).input[1] = constant

    def round_tensor(self, tensor: str, encoding: QuantParams, readers: Iterable[str]) -> None:
        """Let nodes read a rounded tensor."""
        limits = [
            self.graph.put_constant(f"{tensor}/{bound}", np.float32(value))
            for bound, value in (("low", encoding.low), ("high", encoding.high))
        ]
        step = self.graph.put_constant(f"{tensor}/nudge", np.float32(self.nudge * encoding.scale))
        nudged = self.graph.put("AddV2", f"{tensor}/nudged", [tensor, step], T=tf.float32)
        rounded = self.graph.put(
            "FakeQuantWithMinMaxVars",
            f"{tensor}/rounded",
            [nudged, *limits],
            num_bits=8,
            narrow_range=False,
        )
        for name in readers:
            edited = self.graph.edit(name)
            for position, source in enumerate(edited.input):
                if plain(source) == tensor:
                    edited.input[position] = rounded
        if self.output == tensor:
            self.output = rounded

    def __call__(self, feeds: Mapping[str, Array]) -> Array:
        """Return the output."""
        graph = self.graph.pruned([self.output], feeds)
        (output,) = Runner(runnable(graph.to_graph_def()))(feeds, [self.output])
        return np.asarray(output)


def simulated(
    model: TensorFlowModel,
    plan: ResolvedPlan,
    ranges: Mapping[str, Range],
    nudge: float = 0.0,
) -> _Simulation:
    """Return the simulation of a plan for a model with one output.

    `nudge` moves tensors by a fraction of a step before rounding.
    """
    (output,) = model.signature.output_tensors
    simulation, flow = _Simulation(model, output, nudge), plan.flow
    for op, precision in plan.effective.items():
        if precision is Precision.INT8 and op in model.structure.fusion_groups:
            simulation.round_weight(op, weight_qmax(plan.plan[op].weight))
    members, consumers = model.structure.layer_of, model.graph.consumers()
    for tensor, owner in flow.scale_owner.items():
        readers = {name for name, _ in consumers[node_of(tensor)]}
        if tensor in flow.int8_outputs:
            simulation.round_tensor(tensor, QuantParams.of(ranges[owner]), readers)
            continue
        integer = {op for op, sources in flow.int8_reads.items() if tensor in sources}
        inside = {name for name in readers if name in integer or members.get(name) in integer}
        previous, simulation.output = simulation.output, ""
        simulation.round_tensor(tensor, QuantParams.of(ranges[owner]), inside)
        simulation.output = previous
    return simulation
