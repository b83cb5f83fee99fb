"""Cost model of a tuning space: time and degradation of ops per precision, and of conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from statistics import median

from neural_mp.core.enums import Approach, Objective, is_latency_only
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.search.assignment import Assignment, Cost, CutSolver, Node, SharedCost
from neural_mp.space import Capability, TuningSpace

#: NSR that an op itself adds: rounding errors are uniform over a step, which for floats is 2⁻⁷
#: (BF16) or 2⁻¹⁰ (FP16) of the number, on average half of that.
_OWN_NOISE: Mapping[Precision, float] = {
    Precision.INT8: 1e-5,  # weights rounded per channel
    Precision.INT2: 0.1,
    Precision.INT3: 0.02,
    Precision.INT4: 5e-3,  # weights rounded per group
    Precision.BF16: 2.0**-16 / 12,
    Precision.FP16: 2.0**-22 / 12,
    Precision.FP32: 0.0,
}
#: Unless measured, an op's time is proportional to the bits of its precision, and one conversion of
#: a tensor costs this fraction of an average op's FP32 time.
_CONVERSION = 0.05
#: Emulated precisions are assumed slower than FP32, unless their time was measured.
_EMULATED = 1.1
#: INT8 counts as slower than the fastest float precision only from this ratio on: timings of single
#: ops are rough and include conversions that neighbours in INT8 make unnecessary, unless
#: conversions were timed by themselves.
_INT8_MIN_SLOWDOWN = 1.2
#: Upper bound of the time relative to that precision for INT8 ops below that ratio.
_INT8_ASSUMED_TIME_RATIO = 0.95
#: Weight of the model's size when latency is the objective, as a fraction of FP32's time. Applies
#: to weight-only INT8, which saves hardly any time: of plans that are about equally fast, the
#: smaller is chosen.
_SIZE_WEIGHT = 0.05


@dataclass(frozen=True)
class CostInputs:
    """Inputs of a cost model, besides the space.

    Attributes:
        sensitivities: quantized tensor → degradation due to its quantization.
        objectives: objective to minimize → weight: `performance`, `footprint`, `modelsize`.
        times: measured times of ops and conversions.
        weights: op → number of elements in its weights.
        values: tensor → number of elements per sample.
        in_place: whether ops were timed within a tried plan; small differences then count.
    """

    sensitivities: Mapping[str, float]
    objectives: Mapping[Objective, float] = field(
        default_factory=lambda: {Objective.PERFORMANCE: 1.0}
    )
    times: OpTimings = field(default_factory=OpTimings)
    weights: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    in_place: bool = False

    def op_fractions(self, ops: Sequence[str]) -> dict[str, tuple[float, float]]:
        """Return op → its fractions of the FP32 time and of all weights; equal ones if unknown."""
        times = _normalize_amounts(self.op_seconds(ops))
        sizes = [self.weights.get(op, 0) for op in ops]
        whole = sum(sizes)
        weights = [size / whole if whole else 1 / len(ops) for size in sizes]
        return dict(zip(ops, zip(times, weights, strict=True), strict=True))

    def in_int8_for_size_only(self, plan: PrecisionPlan) -> frozenset[str]:
        """Return the weight-only INT8 ops of a plan whose gain in time does not justify them.

        Empty if latency is not the only objective. Without times, these are all weight-only ops of
        a plan whose other INT8 ops have more weights: tables, which INT8 hardly speeds up.
        """
        bytes_of_all, seconds_of_all = (
            sum(self.weights.values()),
            sum(self.op_seconds(self.times.ops)),
        )
        if not is_latency_only(self.objectives) or not bytes_of_all:
            return frozenset()
        weight_only = [op for op, c in plan.items() if c.approach is Approach.WEIGHT_ONLY]
        if not seconds_of_all:
            in_int8 = [op for op, config in plan.items() if config.precision is Precision.INT8]
            size_only, all_int8 = (
                sum(self.weights.get(op, 0) for op in ops) for ops in (weight_only, in_int8)
            )
            return frozenset(weight_only if 2 * size_only < all_int8 else ())
        unjustified: set[str] = set()
        for op, seconds in zip(weight_only, self.op_seconds(weight_only), strict=True):
            saved = seconds * (1 - self.time_ratio(op, Precision.INT8, False)) / seconds_of_all
            if saved - _SIZE_WEIGHT * self.weights.get(op, 0) / bytes_of_all <= 0:
                unjustified.add(op)
        return frozenset(unjustified)

    def op_seconds(self, ops: Iterable[str]) -> list[float]:
        """Return the FP32 seconds of each op; 0 if not measured."""
        return [self.times.ops.get(op, {}).get(Precision.FP32, 0.0) for op in ops]

    def time_ratio(self, op: str, precision: Precision, emulated: bool) -> float:
        """Return the time of an op as a fraction of its FP32 time."""
        measured = self.times.ops.get(op, {})
        unknown = precision not in measured or not measured.get(Precision.FP32)
        if unknown or precision is Precision.FP32:
            return _EMULATED if emulated else precision.bits / 32
        duration = measured[precision]
        if precision is Precision.INT8 and not (self.in_place or self.times.conversions):
            fastest = min(seconds for p, seconds in measured.items() if not p.is_integer)
            if duration <= _INT8_MIN_SLOWDOWN * fastest:
                duration = min(duration, _INT8_ASSUMED_TIME_RATIO * fastest)
        return duration / measured[Precision.FP32]


def _normalize_amounts(amounts: Sequence[float]) -> list[float]:
    """Return amounts as fractions of their sum; unknown amounts (0) count as the median."""
    measured = [amount for amount in amounts if amount > 0]
    middle = median(measured) if measured else 1.0
    filled = [amount or middle for amount in amounts]
    whole = sum(filled)
    return [amount / whole for amount in filled]


@dataclass(frozen=True)
class CostModel:
    """A tuning space as an assignment problem.

    Attributes:
        levels: its precisions: INT8, then the others, fewest bits first.
        assignment: the tunable ops with their costs.
    """

    space: TuningSpace
    levels: tuple[Precision, ...]
    assignment: Assignment

    @cached_property
    def cut_solver(self) -> CutSolver:
        """The solver of the assignment problem."""
        return CutSolver(self.assignment)

    def plan_cost(self, plan: PrecisionPlan) -> Cost:
        """Return the costs of a plan; ops missing in the plan count as FP32."""
        chosen = plan.precisions
        return self.assignment.evaluate_cost(
            {op: self.levels.index(chosen.get(op, Precision.FP32)) for op in self.space.tunable_ops}
        )

    def find_best_plan(self, weight: float) -> PrecisionPlan:
        """Return the plan with the least time + weight · degradation."""
        return self.build_plan(self.cut_solver.find_best_levels(weight))

    def build_plan(self, levels: Mapping[Node, int]) -> PrecisionPlan:
        """Return the plan of an assignment.

        Ops that can only follow their neighbours into their 16-bit precision are left out.
        """
        chosen = {
            op: self.space.choice(op, self.levels[levels[op]]) for op in self.space.tunable_ops
        }
        return PrecisionPlan({op: config for op, config in chosen.items() if config is not None})


def build_cost_model(space: TuningSpace, figures: CostInputs) -> CostModel:
    """Build the cost model of a space.

    Times are fractions of the FP32 time of the whole model; sizes likewise, if size is an
    objective. The noise of a quantized tensor is paid once, if any consumer reads the tensor in
    INT8, or if its producer can write INT8 only. So falling back one of several consumers gains
    nothing: all fall back, or none.
    """
    present, order = {*space.usable_precisions, Precision.FP32}, list(Precision)
    # INT8 is the lowest level, as only INT8 quantizes inputs, which conversions are paid for.
    levels = tuple(sorted(present, key=lambda p: (p is not Precision.INT8, p.bits, order.index(p))))
    fractions = figures.op_fractions(space.tunable_ops)
    costs: dict[Node, tuple[Cost, ...]] = {
        op: tuple(
            _estimate_op_cost(space.capabilities[op], op, p, figures, fractions[op]) for p in levels
        )
        for op in space.tunable_ops
    }
    shared: Iterable[SharedCost] = ()
    if Precision.INT8 in levels:
        shared = (*_noise_and_conversions(space, figures), *_fused_in_fp32(space, figures))
    return CostModel(space, levels, Assignment(costs, tuple(shared)))


def _estimate_op_cost(
    capability: Capability,
    op: str,
    precision: Precision,
    figures: CostInputs,
    fractions: tuple[float, float],
) -> Cost:
    config = capability.config(precision)
    if config is None:
        return inf, 0.0
    time, size = fractions
    time *= figures.time_ratio(op, precision, precision in capability.emulated)
    time_weight = figures.objectives.get(Objective.PERFORMANCE, 0.0)
    int8 = capability.config(Precision.INT8)
    weight_only = int8 is not None and int8.approach is Approach.WEIGHT_ONLY
    size_weight = max(1 - time_weight, _SIZE_WEIGHT if weight_only else 0.0)
    return time_weight * time + size_weight * size * precision.bits / 32, _OWN_NOISE[precision]


def _noise_and_conversions(space: TuningSpace, figures: CostInputs) -> Iterator[SharedCost]:
    """Yield the noise and conversion costs at the bound between INT8 and the higher levels."""
    cost = _cost_per_conversion(space, figures)
    for tensor in space.tensors:
        conversion = (cost(tensor.name), 0.0)
        sensitivity = figures.sensitivities.get(tensor.name, 0.0)
        yield SharedCost((0.0, sensitivity), 1, tensor.quantizing_ops)
        for producer in tensor.producers:
            for below in (True, False):
                yield SharedCost(conversion, 1, tensor.consumers, below=below, and_not=producer)
        if not tensor.producers:
            yield SharedCost(conversion, 1, tensor.consumers)


def _cost_per_conversion(space: TuningSpace, figures: CostInputs) -> Callable[[str], float]:
    importance, times = figures.objectives.get(Objective.PERFORMANCE, 0.0), figures.times
    whole = sum(figures.op_seconds(space.tunable_ops))
    if times.conversion is None or whole <= 0:
        estimate = importance * _CONVERSION / max(len(space.tunable_ops), 1)
        return lambda tensor: estimate
    least, per_element, measured = times.conversion, times.per_element, times.conversions

    return lambda tensor: (
        importance
        * measured.get(tensor, least + per_element * figures.values.get(tensor, 0.0))
        / whole
    )


def _fused_in_fp32(space: TuningSpace, figures: CostInputs) -> Iterator[SharedCost]:
    """Yield the cost of taking apart two ops that run in one kernel in FP32.

    Left alone in FP32, either takes about as long as that kernel.
    """
    importance, times = figures.objectives.get(Objective.PERFORMANCE, 0.0), figures.times
    whole = sum(figures.op_seconds(space.tunable_ops))
    for op in filter(times.runs_within_another, space.tunable_ops):
        adjacent = (*space.graph.consumer_names(op), *space.graph[op].inputs)
        timed = (name for name in adjacent if Precision.FP32 in times.ops.get(name, {}))
        kernel = next((name for name in timed if not times.runs_within_another(name)), None)
        if kernel is not None:
            cost = (importance * times.ops[kernel][Precision.FP32] / whole, 0.0)
            for first, second in ((op, kernel), (kernel, op)):
                yield SharedCost(cost, 1, (first,), and_not=second)


def predict_plan_time(space: TuningSpace, figures: CostInputs, plan: PrecisionPlan) -> float | None:
    """Predict the time of a plan's model from single-op times, as a fraction of FP32's.

    Ops that are not tunable count with their FP32 time. None if times are unknown.
    """
    whole, tunable = figures.times.whole, sum(figures.op_seconds(space.tunable_ops))
    if not whole or not tunable:
        return None
    in_place = replace(figures, objectives={Objective.PERFORMANCE: 1.0}, in_place=True)
    time, _ = build_cost_model(space, in_place).plan_cost(plan)
    return 1 - (1 - time) * min(1.0, tunable / whole)


def without_tensors(
    space: TuningSpace, plan: PrecisionPlan, tensors: Iterable[QuantizedTensor]
) -> PrecisionPlan:
    """Return a plan with the ops that quantize these tensors in their best choice besides INT8."""
    return without_int8(space, plan, {op for tensor in tensors for op in tensor.quantizing_ops})


def without_int8(space: TuningSpace, plan: PrecisionPlan, ops: Iterable[str]) -> PrecisionPlan:
    """Return a plan with these ops in their best choice besides INT8."""
    return plan.replacing(
        {op: next(c for c in space.choices(op) if c.precision is not Precision.INT8) for op in ops}
    )
