"""Noise of single tensors and weights, by one model with a switch for each.

Every tensor is rounded in a branch of an `If` for each storage type, and every op with a weight is
computed in a branch with the rounded one. The switches are inputs of the graph, and all branches
but those of one switch are skipped, so that a run takes hardly longer than one of the float graph.
One session serves all measurements, where a session for each plan would take several times as
long.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, require_constant_array
from neural_mp.adaptors.onnxrt.targets.quantization import (
    UNBOUNDED,
    Grid,
    find_channel_axis,
    find_constant_weight,
    make_fixed_grid,
    make_observed_grid,
    make_weight_grid,
    map_result_bounds,
    map_touching_ops,
)
from neural_mp.adaptors.onnxrt.targets.stages import (
    PreparedStage,
    Run,
    StagedRun,
    fix_inputs,
    split_graph,
)
from neural_mp.core.enums import CalibrationAlgorithm, Granularity, QuantDType
from neural_mp.core.observations import Range, TensorNoise
from neural_mp.core.precision import OpConfig
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.targets import TargetProfile
from neural_mp.util.noise import compute_output_nsrs, mean_signal_nsr
from neural_mp.util.pytree import list_float_arrays

#: Noise in 8 bits below which that in 16 bits is computed: steps are 256 times finer, and of
#: activations half of that, as their grids cover twice the range.
_NEGLIGIBLE_NSR = 1e-3
_FINER_POWER = 128.0**2
#: Noise on one sample from which more samples are measured: hundreds below do not add up to a loss.
_LEAST_NSR = 1e-4
#: Tensors or weights that are measured together first, neighbours in the graph, and the noise up to
#: which they share their sum instead of being measured alone: most of a model's add little.
_GROUP_SIZE, _QUIET_NSR = 8, 3e-4
#: Tensors and weights in a stage of the graph, and the number of stages: with `n` of them, all
#: switches take about (n + 1) / 2n of the time.
_LEAST_IN_STAGE, _MAX_STAGES = 8, 12
#: Number of tensors or weights up to which each is measured alone, which takes little time.
_MAX_SINGLES = 40
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
    def switch_names(self) -> list[str]:
        """The names of all switches."""
        parts = (*self.tensors.values(), *self.weights.values())
        return [name for by_type in parts for name in by_type.values()]

    @property
    def unswitched(self) -> dict[str, Array]:
        """The inputs that no data have: all switches off, grids by the default algorithm."""
        off = dict.fromkeys(self.switch_names, np.zeros((), np.bool_))
        parts = (grids[_DEFAULT].items() for grids in self.grids.values())
        return {**off, **{name: array for items in parts for name, array in items}}

    def make_stages(
        self, create_run: Callable[[ir.Model, Sequence[str]], Run]
    ) -> list[PreparedStage]:
        """Return the graph in stages, so that a run does without those before its switch.

        `create_run` makes the run of a graph and its outputs. Behind a switch, stages run without.
        """
        count = (len(self.tensors) + len(self.weights)) // _LEAST_IN_STAGE
        unswitched, stages = self.unswitched, list[PreparedStage]()
        for stage in split_graph(self.program, min(max(1, count), _MAX_STAGES)):
            run = create_run(stage.program, stage.outputs)
            plain = create_run(fix_inputs(stage.program, unswitched), stage.outputs)
            run_fixed = partial(_run_without, plain, unswitched)
            stages.append(PreparedStage(stage, run, run_fixed))
        return stages


def _run_without(run: Run, left_out: Collection[str], feeds: Mapping[str, Array]) -> list[Array]:
    return run({name: array for name, array in feeds.items() if name not in left_out})


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


#: A switch, and what makes the ops of its branch.
_Branch = tuple[ir.Value, Callable[[], list[ir.Node]]]


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
        self._bounds = map_result_bounds(self._graph, self.profile)

    def measure_before_saturation(self) -> None:
        """Return the inputs of a last Softmax or Sigmoid instead of its results."""
        for position, value in enumerate(self._graph.outputs):
            producer = value.producer()
            if producer is not None and producer.op_type in _SATURATING and producer.inputs[0]:
                self._graph.outputs[position] = producer.inputs[0]

    def insert_all(self) -> None:
        """Insert the switches."""
        for value, ops in map_touching_ops(self._graph, self.configs, self.profile).items():
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
            weight = find_constant_weight(node)
            if weight is not None and specs:
                by_channel = {d: s.granularity is Granularity.PER_CHANNEL for d, s in specs.items()}
                self.weights[str(node.name)] = self._insert_weight(node, weight, by_channel)

    def _insert_tensor(
        self, value: ir.Value, dtypes: Sequence[QuantDType], tensor: str
    ) -> dict[QuantDType, str]:
        readers, producer = [(use.node, use.idx) for use in value.uses()], value.producer()
        branches, switches = list[_Branch](), dict[QuantDType, str]()
        for dtype in dtypes:
            grids, name = self._candidate_grids(value, dtype), f"{value.name}/{dtype}"
            is_calibrated = dtype is dtypes[0] and len(grids) > 1
            make = self._add_input if is_calibrated else self._new.add_constant
            parts = [make(f"{name}/{n}", array) for n, array in _list_grid_parts(grids[_DEFAULT])]
            if is_calibrated:
                self.grids[tensor] = {
                    algorithm: {
                        str(part.name): array
                        for part, (_, array) in zip(parts, _list_grid_parts(grid), strict=True)
                    }
                    for algorithm, grid in grids.items()
                }
            switch = self._add_input(f"{name}/switch", np.zeros((), np.bool_))
            switches[dtype] = str(switch.name)
            branches.append((switch, partial(self._insert_rounding, value, parts, name)))
        choice = self._choice(branches, lambda: [self._node("Identity", [value])], value)
        if producer is None:
            self._graph.insert_before(next(iter(self._graph)), choice)
        else:
            self._graph.insert_after(producer, choice)
        (total,) = choice.outputs
        for node, position in readers:
            node.replace_input_with(position, total)
        for position, output in enumerate(self._graph.outputs):
            if output is value:
                self._graph.outputs[position] = total
        total.shape = value.shape
        return switches

    def _candidate_grids(self, value: ir.Value, dtype: QuantDType) -> dict[str, Grid]:
        """Return calibration algorithm → the grid of a tensor; a fixed one is the default."""
        producer = value.producer()
        if producer is not None:
            fixed = self.profile.fixed.get(producer.op_type, {}).get(dtype)
            if fixed is not None:
                return {_DEFAULT: make_fixed_grid(*fixed, dtype)}
        return {
            algorithm: make_observed_grid(
                ranges[str(value.name)],
                dtype,
                self.profile.activation,
                self._bounds.get(str(value.name), UNBOUNDED),
            )
            for algorithm, ranges in self.ranges.items()
        }

    def _insert_weight(
        self, node: ir.Node, weight: ir.Value, by_channel: Mapping[QuantDType, bool]
    ) -> dict[QuantDType, str]:
        values, position = require_constant_array(weight), list(node.inputs).index(weight)
        branches, switches = list[_Branch](), dict[QuantDType, str]()
        for dtype, per_channel in sorted(by_channel.items()):
            axis = find_channel_axis(node) if per_channel else None
            grid = make_weight_grid(values, dtype, axis, self.profile.weight.needs_power_of_two)
            name = f"{node.name}/{weight.name}/{dtype}"
            rounded = self._new.add_constant(
                f"{name}/rounded", grid.dequantize_integers(grid.quantize_values(values))
            )
            switch = self._add_input(f"{name}/switch", np.zeros((), np.bool_))
            switches[dtype] = str(switch.name)
            branches.append((switch, partial(self._with_input, node, position, rounded)))
        (result,) = node.outputs
        choice = self._choice(branches, lambda: self._with_input(node, position, weight), result)
        self._graph.insert_after(node, choice)
        choice.outputs[0].shape = result.shape
        result.replace_all_uses_with(choice.outputs[0], replace_graph_outputs=True)
        self._graph.remove(node, safe=True)
        return switches

    def _insert_rounding(
        self, value: ir.Value, parts: Sequence[ir.Value], name: str
    ) -> list[ir.Node]:
        integers = self._node("QuantizeLinear", [value, *parts])
        return [integers, self._node("DequantizeLinear", [integers.outputs[0], *parts])]

    def _with_input(self, node: ir.Node, position: int, value: ir.Value) -> list[ir.Node]:
        """Return a copy of an op with another input."""
        inputs = [*node.inputs[:position], value, *node.inputs[position + 1 :]]
        return [self._node(node.op_type, inputs, node.attributes.values())]

    def _choice(
        self, branches: Sequence[_Branch], otherwise: Callable[[], list[ir.Node]], like: ir.Value
    ) -> ir.Node:
        """Return the op that computes the branch of the first switch that is on, or otherwise."""
        switch, make = branches[0]
        rest = branches[1:]
        last = [self._choice(rest, otherwise, like)] if rest else otherwise()
        attributes = []
        for name, nodes in (("then_branch", make()), ("else_branch", last)):
            (result,) = nodes[-1].outputs
            result.type = like.type
            graph = ir.Graph([], [result], nodes=nodes, name=self._new.reserve_name("branch"))
            attributes.append(ir.AttrGraph(name, graph))
        choice = self._node("If", [switch], attributes)
        choice.outputs[0].type = like.type
        return choice

    def _node(
        self, op_type: str, inputs: Sequence[ir.Value | None], attributes: Iterable[ir.Attr] = ()
    ) -> ir.Node:
        name = self._new.reserve_name(f"switched/{op_type}")
        result = ir.val(self._new.reserve_name(f"{name}/result"))
        return ir.node(
            op_type, inputs, {a.name: a for a in attributes}, outputs=[result], name=name
        )

    def _add_input(self, name: str, array: Array) -> ir.Value:
        """Return a new input of the graph, of the type of a number."""
        value = ir.val(
            self._new.reserve_name(name), ir.DataType.from_numpy(array.dtype), ir.Shape([])
        )
        self._graph.inputs.append(value)
        return value


def _list_grid_parts(grid: Grid) -> tuple[tuple[str, Array], tuple[str, Array]]:
    """Return the scale and the zero point of a grid, each with a name."""
    return ("scale", grid.scale), ("zero", grid.zero_point)


@dataclass(frozen=True)
class NoiseProbe:
    """Inputs on which noise is measured.

    Attributes:
        feeds: the inputs by name.
        samples: the number of samples.
    """

    feeds: Mapping[str, Array]
    samples: int


def measure_noise(
    model: SwitchModel,
    stages: Sequence[PreparedStage],
    probes: tuple[NoiseProbe, NoiseProbe],
) -> tuple[tuple[TensorNoise, ...], dict[str, dict[str, float]]]:
    """Return the noise of every tensor, and op → bits → noise of its weight.

    The first of the `probes` decides which noises are large enough to be measured on the second.
    `stages` are those of the model: only the ones behind a switch run.
    """
    brief, full = (_Meter(model, stages, probe) for probe in probes)
    meter = _TwoStages(brief, full if probes[1].samples > probes[0].samples else brief)
    noise = meter.measure_all(model.tensors)
    typical = meter.measure_by_algorithm()
    tensors = tuple(
        TensorNoise(tensor, model.readers[tensor], measure_by_bits, typical[tensor])
        for tensor, measure_by_bits in noise.items()
    )
    return tensors, meter.measure_all(model.weights)


@dataclass
class _Meter:
    """Measures noise on one probe."""

    model: SwitchModel
    stages: Sequence[PreparedStage]
    probe: NoiseProbe

    def __post_init__(self) -> None:
        outputs = [str(value.name) for value in self.model.program.graph.outputs]
        feeds = {**self.probe.feeds, **self.model.unswitched}
        self._staged = StagedRun(self.stages, outputs, feeds)

    @cached_property
    def _reference(self) -> list[Array]:
        return list_float_arrays(self._staged.run({}))

    def noise(self, switches: Sequence[str], grid: Mapping[str, Array]) -> tuple[float, float]:
        """Return the NSR with switches on, and that of the typical sample; see `TensorNoise`."""
        on = dict.fromkeys(switches, np.ones((), np.bool_))
        outputs = list_float_arrays(self._staged.run({**grid, **on}))
        nsrs = compute_output_nsrs(self._reference, outputs)
        of_samples = nsrs if self.probe.samples == 1 else self._compute_sample_nsrs(outputs)
        signals = [min(nsr, 1.0) for nsr in of_samples if not math.isnan(nsr)]
        return mean_signal_nsr(nsrs), float(np.mean(signals)) if signals else 0.0

    def _compute_sample_nsrs(self, outputs: Sequence[Array]) -> list[float]:
        """Return the NSR of each output for each sample."""
        nsrs: list[float] = []
        for expected, actual in zip(self._reference, outputs, strict=True):
            rows = self.probe.samples if expected.shape[:1] == (self.probe.samples,) else 1
            parts = (array.reshape(rows, -1) for array in (expected, actual))
            nsrs += compute_output_nsrs(*parts)
        return nsrs


@dataclass
class _TwoStages:
    """Measures briefly first, and large noises on more samples."""

    brief: _Meter
    full: _Meter
    #: Switch → what measured its noise, and the NSR of the typical sample.
    measured: dict[str, tuple[_Meter, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.model = self.full.model

    def measure_all(
        self, switched: Mapping[str, Mapping[QuantDType, str]]
    ) -> dict[str, dict[str, float]]:
        """Return tensor or op → bits → noise, from storage type → switch of each."""
        names, noise = list(switched), dict[str, dict[str, float]]()
        size = 1 if len(names) <= _MAX_SINGLES else _GROUP_SIZE
        for start in range(0, len(names), size):
            group = {name: switched[name] for name in names[start : start + size]}
            noise |= self._measure_group(group)
        return noise

    def _measure_group(
        self, switched: Mapping[str, Mapping[QuantDType, str]]
    ) -> dict[str, dict[str, float]]:
        """Return the noise of each; that of a group without much is split evenly."""
        names = list(switched)
        if len(names) == 1:
            return {names[0]: self.measure_by_bits(switched[names[0]])}
        narrow = {name: min(own, key=lambda dtype: dtype.bits) for name, own in switched.items()}
        switches = [switched[name][dtype] for name, dtype in narrow.items()]
        nsr, typical = (total / len(names) for total in self.brief.noise(switches, {}))
        if nsr * len(names) >= _QUIET_NSR:
            halves = names[: len(names) // 2], names[len(names) // 2 :]
            first, second = ({name: switched[name] for name in half} for half in halves)
            return self._measure_group(first) | self._measure_group(second)
        self.measured |= dict.fromkeys(switches, (self.brief, typical))
        return {
            name: {str(d.bits): nsr if d is narrow[name] else nsr / _FINER_POWER for d in own}
            for name, own in switched.items()
        }

    def measure_by_bits(self, switches: Mapping[QuantDType, str]) -> dict[str, float]:
        """Return bits → noise of a tensor or weight."""
        noise: dict[str, float] = {}
        for dtype, switch in sorted(switches.items(), key=lambda item: item[0].bits):
            coarse = noise.get("8")
            if dtype.bits == 16 and coarse is not None and coarse < _NEGLIGIBLE_NSR:
                noise["16"] = coarse / _FINER_POWER
            else:
                noise[str(dtype.bits)] = self._noise(switch)
        return noise

    def _noise(self, switch: str) -> float:
        meter = self.brief
        nsr, typical = meter.noise([switch], {})
        if nsr >= _LEAST_NSR and self.full is not self.brief:
            meter = self.full
            nsr, typical = meter.noise([switch], {})
        self.measured[switch] = meter, typical
        return nsr

    def measure_by_algorithm(self) -> dict[str, dict[str, float]]:
        """Return tensor → calibration algorithm → NSR of the typical sample in the fewest bits.

        Only `minmax` where an op decides on the range of tensors of little noise.
        """
        switches = {tensor: next(iter(own.values())) for tensor, own in self.model.tensors.items()}
        noise = {t: {str(_DEFAULT): self.measured[own][1]} for t, own in switches.items()}
        decided: dict[str, list[str]] = defaultdict(list)
        for tensor in noise:
            decided[self.model.readers[tensor][0]].append(tensor)

        def sum_tensor_noise(tensors: Sequence[str], algorithm: str) -> float:
            return sum(noise[t].get(algorithm, noise[t][_DEFAULT]) for t in tensors)

        remaining = sum_tensor_noise(list(noise), _DEFAULT)
        for tensors in sorted(decided.values(), key=lambda t: -sum_tensor_noise(t, _DEFAULT)):
            before = sum_tensor_noise(tensors, _DEFAULT)
            if before <= _MIN_NOISE_SHARE * remaining:
                break
            for tensor in tensors:
                noise[tensor] |= self._measure_alternatives(tensor, switches[tensor])
            remaining += min(sum_tensor_noise(tensors, a) for a in RANGE_ALGORITHMS) - before
        return noise

    def _measure_alternatives(self, tensor: str, switch: str) -> dict[str, float]:
        grids, (meter, _) = self.model.grids.get(tensor, {}), self.measured[switch]
        steps = {algorithm: float(next(iter(grid.values()))) for algorithm, grid in grids.items()}
        return {
            algorithm: meter.noise([switch], grid)[1]
            for algorithm, grid in grids.items()
            if steps[algorithm] <= _MAX_STEP_RATIO * steps[_DEFAULT]
        }
