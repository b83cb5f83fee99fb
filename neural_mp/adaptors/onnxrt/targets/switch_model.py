"""Noise of single tensors and weights, by one model with a switch for each.

Every tensor y becomes y + Σ sᵇ·(qᵇ(y) − y) over its storage types b, and every weight likewise;
the switches s are inputs of the graph. One session serves all measurements, where a session for
each plan would take several times as long.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, is_float32, known_array, used_outputs
from neural_mp.adaptors.onnxrt.targets.qdq_writer import keeps_scale, moved_operands
from neural_mp.adaptors.onnxrt.targets.quant_grid import (
    Grid,
    activation_grid,
    fixed_grid,
    weight_grid,
)
from neural_mp.adaptors.onnxrt.targets.quantized_ops import channel_axis, is_parameter, weight_of
from neural_mp.core.enums import Granularity, QuantDType
from neural_mp.core.observations import Range
from neural_mp.core.precision import OpConfig
from neural_mp.core.width_figures import TensorNoise
from neural_mp.targets import TargetProfile
from neural_mp.util.noise import mean_nsr
from neural_mp.util.pytree import float_arrays

#: Noise in 8 bits below which that in 16 bits is computed: 256 times finer steps.
_NEGLIGIBLE_NSR = 1e-3
_FINER_POWER = 256.0**2
#: Last ops of a graph that saturate: noise is measured before them.
_SATURATING = ("Softmax", "Sigmoid", "LogSoftmax")


@dataclass(frozen=True)
class SwitchModel:
    """A graph with switches.

    Attributes:
        program: the graph; its outputs are those that noise is measured at.
        tensors: tensor → storage type → the name of its switch.
        weights: op → storage type → the name of its switch.
        readers: tensor → the ops that a plan decides on, and that write or read the tensor.
    """

    program: ir.Model
    tensors: Mapping[str, Mapping[QuantDType, str]]
    weights: Mapping[str, Mapping[QuantDType, str]]
    readers: Mapping[str, tuple[str, ...]]

    @property
    def switches(self) -> list[str]:
        """The names of all switches."""
        parts = (*self.tensors.values(), *self.weights.values())
        return [name for by_type in parts for name in by_type.values()]


def build_switch_model(
    program: ir.Model,
    configs: Mapping[str, Sequence[OpConfig]],
    ranges: Mapping[str, Range],
    names: Mapping[str, str],
    profile: TargetProfile,
) -> SwitchModel:
    """Return the graph with a switch for every tensor and weight that a plan may quantize.

    Args:
        program: the float graph, with types.
        configs: op → its configs in integers.
        ranges: value → the range of its integers; values without one get no switch.
        names: value → the name of its tensor.
        profile: the rules of the target.
    """
    builder = _Builder(program.clone(), configs, ranges, names, profile)
    builder.measure_before_saturation()
    builder.insert_all()
    return SwitchModel(builder.program, builder.tensors, builder.weights, builder.readers)


@dataclass
class _Builder:
    program: ir.Model
    configs: Mapping[str, Sequence[OpConfig]]
    ranges: Mapping[str, Range]
    names: Mapping[str, str]
    profile: TargetProfile
    tensors: dict[str, dict[QuantDType, str]] = field(default_factory=dict)
    weights: dict[str, dict[QuantDType, str]] = field(default_factory=dict)
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._graph = self.program.graph
        self._new = GraphNames(self._graph)

    def measure_before_saturation(self) -> None:
        """Return the inputs of a last Softmax or Sigmoid instead of its results."""
        for position, value in enumerate(self._graph.outputs):
            producer = value.producer()
            if producer is not None and producer.op_type in _SATURATING and producer.inputs[0]:
                self._graph.outputs[position] = producer.inputs[0]

    def insert_all(self) -> None:
        """Insert the switches."""
        touching = self._touching_ops()
        for value, ops in touching.items():
            dtypes = {c.activation.dtype for op in ops for c in self.configs[op] if c.activation}
            if str(value.name) in self.ranges and dtypes:
                tensor = self.names[str(value.name)]
                self.readers[tensor] = tuple(ops)
                self.tensors[tensor] = self._insert_tensor(value, sorted(dtypes))
        for node in list(self._graph):
            configs = self.configs.get(str(node.name), ())
            specs = {c.weight.dtype: c.weight for c in configs if c.weight is not None}
            weight = weight_of(node)
            if weight is not None and specs:
                by_channel = {d: s.granularity is Granularity.PER_CHANNEL for d, s in specs.items()}
                self.weights[str(node.name)] = self._insert_weight(node, weight, by_channel)

    def _touching_ops(self) -> dict[ir.Value, list[str]]:
        """Return tensor → the ops of a plan that write or read it, also through moving ops."""
        roots: dict[ir.Value, tuple[ir.Value, ...]] = {}
        touching: dict[ir.Value, list[str]] = {}
        for node in self._graph:
            name = str(node.name)
            if node.inputs and keeps_scale(node, self.profile):
                moved = [node.inputs[position] for position in moved_operands(node)]
                computed = [v for v in moved if v is not None and v.const_value is None]
                sources = tuple(root for value in computed for root in roots.get(value, (value,)))
                if sources:
                    roots.update(dict.fromkeys(used_outputs(node), sources))
                    continue
            if name not in self.configs:
                continue
            operands = [
                value
                for position, value in enumerate(node.inputs)
                if is_float32(value) and value is not None and value.const_value is None
                if not is_parameter(node, position)
            ]
            for value in (*operands, *used_outputs(node)):
                for root in roots.get(value, (value,)):
                    ops = touching.setdefault(root, [])
                    if name not in ops:
                        ops.append(name)
        return touching

    def _insert_tensor(
        self, value: ir.Value, dtypes: Sequence[QuantDType]
    ) -> dict[QuantDType, str]:
        terms, switches = [], {}
        readers = [(use.node, use.idx) for use in value.uses()]
        producer = value.producer()
        first: list[ir.Node] = []
        for dtype in dtypes:
            grid = self._grid(value, dtype)
            plain = self._rounded(value, grid, f"{value.name}/{dtype}", first)
            error = self._add(first, "Sub", [plain, value], f"{value.name}/{dtype}/error")
            term, switches[dtype] = self._switched(first, error, f"{value.name}/{dtype}")
            terms.append(term)
        total = value
        for term in terms:
            total = self._add(first, "Add", [total, term], f"{term.name}/sum")
        anchor = next(iter(self._graph)) if producer is None else None
        if producer is None:
            assert anchor is not None
            self._graph.insert_before(anchor, first)
        else:
            self._graph.insert_after(producer, first)
        for node, position in readers:
            node.replace_input_with(position, total)
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = total
        total.type, total.shape = value.type, value.shape
        return switches

    def _grid(self, value: ir.Value, dtype: QuantDType) -> Grid:
        producer, rules = value.producer(), self.profile.activation
        fixed = (
            None if producer is None else self.profile.fixed.get(producer.op_type, {}).get(dtype)
        )
        if fixed is not None:
            return fixed_grid(*fixed, dtype)
        span = self.ranges[str(value.name)]
        return activation_grid(*span, dtype, rules.scheme, rules.scale == "power_of_two")

    def _insert_weight(
        self, node: ir.Node, weight: ir.Value, by_channel: Mapping[QuantDType, bool]
    ) -> dict[QuantDType, str]:
        values, switches = known_array(weight), {}
        total, nodes = weight, list[ir.Node]()
        for dtype, per_channel in sorted(by_channel.items()):
            axis = channel_axis(node) if per_channel else None
            grid = weight_grid(values, dtype, axis, self.profile.weight.scale == "power_of_two")
            error = grid.dequantize(grid.quantize(values)) - values
            name = f"{node.name}/{weight.name}/{dtype}"
            stored = self._new.constant(f"{name}/error", error.astype(np.float32))
            term, switches[dtype] = self._switched(nodes, stored, name)
            total = self._add(nodes, "Add", [total, term], f"{name}/sum")
        self._graph.insert_before(node, nodes)
        node.replace_input_with(list(node.inputs).index(weight), total)
        return switches

    def _rounded(self, value: ir.Value, grid: Grid, name: str, nodes: list[ir.Node]) -> ir.Value:
        scale = self._new.constant(f"{name}/scale", grid.scale)
        zero = self._new.constant(f"{name}/zero", grid.zero_point)
        integers = self._add(nodes, "QuantizeLinear", [value, scale, zero], f"{name}/integers")
        return self._add(nodes, "DequantizeLinear", [integers, scale, zero], f"{name}/rounded")

    def _switched(self, nodes: list[ir.Node], error: ir.Value, name: str) -> tuple[ir.Value, str]:
        switch = ir.val(self._new.new(f"{name}/switch"), ir.DataType.FLOAT, ir.Shape([]))
        self._graph.inputs.append(switch)
        return self._add(nodes, "Mul", [error, switch], f"{name}/term"), str(switch.name)

    def _add(
        self, nodes: list[ir.Node], op_type: str, inputs: list[ir.Value], name: str
    ) -> ir.Value:
        result = ir.val(self._new.new(name))
        nodes.append(ir.node(op_type, inputs, outputs=[result], name=self._new.new(f"{name}/op")))
        return result


#: Feeds of a run, names of outputs → arrays.
Run = Callable[[Mapping[str, Array]], list[Array]]


def measure_noise(
    model: SwitchModel, run: Run, feeds: Mapping[str, Array]
) -> tuple[tuple[TensorNoise, ...], dict[str, dict[str, float]]]:
    """Return the noise of every tensor on a batch, and op → bits → noise of its weight."""
    off = dict.fromkeys(model.switches, np.zeros((), np.float32))
    reference = float_arrays(run({**feeds, **off}))

    def noise_of(switch: str) -> float:
        outputs = run({**feeds, **off, switch: np.ones((), np.float32)})
        return mean_nsr(reference, float_arrays(outputs))

    def by_bits(switches: Mapping[QuantDType, str]) -> dict[str, float]:
        noise: dict[str, float] = {}
        for dtype, switch in sorted(switches.items(), key=lambda item: item[0].bits):
            coarse = noise.get("8")
            is_computed = dtype.bits == 16 and coarse is not None and coarse < _NEGLIGIBLE_NSR
            noise[str(dtype.bits)] = (
                (coarse or 0.0) / _FINER_POWER if is_computed else noise_of(switch)
            )
        return noise

    tensors = tuple(
        TensorNoise(tensor, model.readers[tensor], by_bits(switches))
        for tensor, switches in model.tensors.items()
    )
    return tensors, {op: by_bits(switches) for op, switches in model.weights.items()}
