"""Noise of single tensors and weights, by one model with a switch for each.

Every tensor y becomes y + Σ sᵇ·(qᵇ(y) − y) over its storage types b, and every weight likewise;
the switches s are inputs of the graph. One session serves all measurements, where a session for
each plan would take several times as long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, known_array
from neural_mp.adaptors.onnxrt.targets.quant_grid import (
    Grid,
    activation_grid,
    fixed_grid,
    weight_grid,
)
from neural_mp.adaptors.onnxrt.targets.quantized_ops import channel_axis, weight_of
from neural_mp.adaptors.onnxrt.targets.shared_scales import touching_ops
from neural_mp.core.enums import CalibrationAlgorithm, Granularity, QuantDType
from neural_mp.core.observations import Range
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.core.width_figures import TensorNoise
from neural_mp.targets import TargetProfile
from neural_mp.util.noise import mean_nsr, output_nsrs
from neural_mp.util.pytree import float_arrays

#: Noise in 8 bits below which that in 16 bits is computed: 256 times finer steps.
_NEGLIGIBLE_NSR = 1e-3
_FINER_POWER = 256.0**2
#: Calibration algorithm of ranges unless another one is chosen.
_DEFAULT = CalibrationAlgorithm.MINMAX
#: Share of the remaining noise from which other algorithms are tried for the tensors of an op.
_MIN_NOISE_SHARE = 0.01
#: Step of another range, relative to that of the default, from which its noise is measured: noise
#: falls with the square of the step at most.
_MAX_STEP_RATIO = 0.95
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
        grids: tensor → calibration algorithm → input of the graph → the scale or zero point of the
            fewest bits; only tensors whose range is calibrated.
    """

    program: ir.Model
    tensors: Mapping[str, Mapping[QuantDType, str]]
    weights: Mapping[str, Mapping[QuantDType, str]]
    readers: Mapping[str, tuple[str, ...]]
    grids: Mapping[str, Mapping[str, Mapping[str, Array]]]

    @property
    def switches(self) -> list[str]:
        """The names of all switches."""
        parts = (*self.tensors.values(), *self.weights.values())
        return [name for by_type in parts for name in by_type.values()]


def build_switch_model(
    program: ir.Model,
    configs: Mapping[str, Sequence[OpConfig]],
    ranges: Mapping[str, Mapping[str, Range]],
    names: Mapping[str, str],
    profile: TargetProfile,
) -> SwitchModel:
    """Return the graph with a switch for every tensor and weight that a plan may quantize.

    Args:
        program: the float graph, with types.
        configs: op → its configs in integers.
        ranges: calibration algorithm → value → the range of its integers; values without one get
            no switch.
        names: value → the name of its tensor.
        profile: the rules of the target.
    """
    builder = _Builder(program.clone(), configs, ranges, names, profile)
    builder.measure_before_saturation()
    builder.insert_all()
    return SwitchModel(
        builder.program, builder.tensors, builder.weights, builder.readers, builder.grids
    )


@dataclass
class _Builder:
    program: ir.Model
    configs: Mapping[str, Sequence[OpConfig]]
    ranges: Mapping[str, Mapping[str, Range]]
    names: Mapping[str, str]
    profile: TargetProfile
    tensors: dict[str, dict[QuantDType, str]] = field(default_factory=dict)
    weights: dict[str, dict[QuantDType, str]] = field(default_factory=dict)
    readers: dict[str, tuple[str, ...]] = field(default_factory=dict)
    grids: dict[str, dict[str, dict[str, Array]]] = field(default_factory=dict)

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
        for value, ops in touching_ops(self._graph, self.configs, self.profile).items():
            dtypes = {c.activation.dtype for op in ops for c in self.configs[op] if c.activation}
            if str(value.name) in self.ranges[_DEFAULT] and dtypes:
                tensor = self.names[str(value.name)]
                self.readers[tensor] = tuple(ops)
                self.tensors[tensor] = self._insert_tensor(
                    value, sorted(dtypes, key=lambda d: d.bits), tensor
                )
        for node in list(self._graph):
            configs = self.configs.get(str(node.name), ())
            specs = {c.weight.dtype: c.weight for c in configs if c.weight is not None}
            weight = weight_of(node)
            if weight is not None and specs:
                by_channel = {d: s.granularity is Granularity.PER_CHANNEL for d, s in specs.items()}
                self.weights[str(node.name)] = self._insert_weight(node, weight, by_channel)

    def _insert_tensor(
        self, value: ir.Value, dtypes: Sequence[QuantDType], tensor: str
    ) -> dict[QuantDType, str]:
        terms, switches = [], {}
        readers = [(use.node, use.idx) for use in value.uses()]
        producer = value.producer()
        first: list[ir.Node] = []
        for dtype in dtypes:
            grids, name = self._grids(value, dtype), f"{value.name}/{dtype}"
            is_calibrated = dtype is dtypes[0] and len(grids) > 1
            make = self._input if is_calibrated else self._new.constant
            parts = [make(f"{name}/{n}", array) for n, array in _parts_of(grids[_DEFAULT])]
            if is_calibrated:
                self.grids[tensor] = {
                    algorithm: {
                        str(part.name): array
                        for part, (_, array) in zip(parts, _parts_of(grid), strict=True)
                    }
                    for algorithm, grid in grids.items()
                }
            plain = self._rounded(value, parts, name, first)
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

    def _grids(self, value: ir.Value, dtype: QuantDType) -> dict[str, Grid]:
        """Return calibration algorithm → the grid of a tensor; a fixed one is the default."""
        producer, rules = value.producer(), self.profile.activation
        if producer is not None:
            fixed = self.profile.fixed.get(producer.op_type, {}).get(dtype)
            if fixed is not None:
                return {_DEFAULT: fixed_grid(*fixed, dtype)}
        is_power = rules.scale == "power_of_two"
        return {
            algorithm: activation_grid(*ranges[str(value.name)], dtype, rules.scheme, is_power)
            for algorithm, ranges in self.ranges.items()
        }

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

    def _rounded(
        self, value: ir.Value, parts: Sequence[ir.Value], name: str, nodes: list[ir.Node]
    ) -> ir.Value:
        integers = self._add(nodes, "QuantizeLinear", [value, *parts], f"{name}/integers")
        return self._add(nodes, "DequantizeLinear", [integers, *parts], f"{name}/rounded")

    def _switched(self, nodes: list[ir.Node], error: ir.Value, name: str) -> tuple[ir.Value, str]:
        switch = self._input(f"{name}/switch", np.zeros((), np.float32))
        return self._add(nodes, "Mul", [error, switch], f"{name}/term"), str(switch.name)

    def _input(self, name: str, array: Array) -> ir.Value:
        """Return a new input of the graph, of the type of a number."""
        value = ir.val(self._new.new(name), ir.DataType.from_numpy(array.dtype), ir.Shape([]))
        self._graph.inputs.append(value)
        return value

    def _add(
        self, nodes: list[ir.Node], op_type: str, inputs: list[ir.Value], name: str
    ) -> ir.Value:
        result = ir.val(self._new.new(name))
        nodes.append(ir.node(op_type, inputs, outputs=[result], name=self._new.new(f"{name}/op")))
        return result


def _parts_of(grid: Grid) -> tuple[tuple[str, Array], tuple[str, Array]]:
    """Return the scale and the zero point of a grid, each with a name."""
    return ("scale", grid.scale), ("zero", grid.zero_point)


#: Feeds of a run, names of outputs → arrays.
Run = Callable[[Mapping[str, Array]], list[Array]]


def measure_noise(
    model: SwitchModel, run: Run, feeds: Mapping[str, Array], samples: int
) -> tuple[tuple[TensorNoise, ...], dict[str, dict[str, float]]]:
    """Return the noise of every tensor on a batch, and op → bits → noise of its weight."""
    meter = _Meter(model, run, feeds, samples)
    noise = {tensor: meter.by_bits(switches) for tensor, switches in model.tensors.items()}
    typical = meter.by_algorithm()
    tensors = tuple(
        TensorNoise(tensor, model.readers[tensor], by_bits, typical[tensor])
        for tensor, by_bits in noise.items()
    )
    return tensors, {op: meter.by_bits(switches) for op, switches in model.weights.items()}


@dataclass
class _Meter:
    model: SwitchModel
    run: Run
    feeds: Mapping[str, Array]
    samples: int
    #: Switch → NSR of the typical sample.
    typical: dict[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._off = dict.fromkeys(self.model.switches, np.zeros((), np.float32))
        for grids in self.model.grids.values():
            self._off.update(grids[_DEFAULT])
        self._reference = float_arrays(self.run({**self.feeds, **self._off}))

    def _outputs(self, switch: str, grid: Mapping[str, Array]) -> list[Array]:
        settings = {**self._off, **grid, switch: np.ones((), np.float32)}
        return float_arrays(self.run({**self.feeds, **settings}))

    def by_bits(self, switches: Mapping[QuantDType, str]) -> dict[str, float]:
        """Return bits → noise of a tensor or weight."""
        noise: dict[str, float] = {}
        for dtype, switch in sorted(switches.items(), key=lambda item: item[0].bits):
            coarse = noise.get("8")
            if dtype.bits == 16 and coarse is not None and coarse < _NEGLIGIBLE_NSR:
                noise["16"] = coarse / _FINER_POWER
                continue
            outputs = self._outputs(switch, {})
            noise[str(dtype.bits)] = mean_nsr(self._reference, outputs)
            self.typical[switch] = self._typical_nsr(outputs)
        return noise

    def by_algorithm(self) -> dict[str, dict[str, float]]:
        """Return tensor → calibration algorithm → NSR of the typical sample in the fewest bits.

        Only `minmax` where an op decides on the range of tensors of little noise.
        """
        switches = {tensor: next(iter(own.values())) for tensor, own in self.model.tensors.items()}
        noise = {tensor: {str(_DEFAULT): self.typical[own]} for tensor, own in switches.items()}
        decided: dict[str, list[str]] = defaultdict(list)
        for tensor in noise:
            decided[self.model.readers[tensor][0]].append(tensor)

        def noise_of(tensors: Sequence[str], algorithm: str) -> float:
            return sum(noise[t].get(algorithm, noise[t][_DEFAULT]) for t in tensors)

        remaining = noise_of(list(noise), _DEFAULT)
        for tensors in sorted(decided.values(), key=lambda t: -noise_of(t, _DEFAULT)):
            before = noise_of(tensors, _DEFAULT)
            if before <= _MIN_NOISE_SHARE * remaining:
                break
            for tensor in tensors:
                noise[tensor] |= self._alternatives(tensor, switches[tensor])
            remaining += min(noise_of(tensors, a) for a in RANGE_ALGORITHMS) - before
        return noise

    def _alternatives(self, tensor: str, switch: str) -> dict[str, float]:
        grids = self.model.grids.get(tensor, {})
        steps = {algorithm: float(next(iter(grid.values()))) for algorithm, grid in grids.items()}
        return {
            algorithm: self._typical_nsr(self._outputs(switch, grid))
            for algorithm, grid in grids.items()
            if steps[algorithm] <= _MAX_STEP_RATIO * steps[_DEFAULT]
        }

    def _typical_nsr(self, outputs: Sequence[Array]) -> float:
        """Return the mean NSR of samples, each at most 1: see `TensorNoise`."""
        nsrs: list[float] = []
        for expected, actual in zip(self._reference, outputs, strict=True):
            rows = self.samples if expected.shape[:1] == (self.samples,) else 1
            parts = (array.reshape(rows, -1) for array in (expected, actual))
            nsrs += (min(nsr, 1.0) for nsr in output_nsrs(*parts) if not math.isnan(nsr))
        return float(np.mean(nsrs)) if nsrs else 0.0
