"""What a tuning space costs: time and harm of every op in every precision, and of conversions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median

from neural_mp.core.enums import Approach, Objective, is_latency_only
from neural_mp.core.observations import OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.search.min_cut import Assignment, Cost, Node, ParetoPoint, SharedCost
from neural_mp.space import Capability, TuningSpace

#: Noise power relative to the signal that an op itself adds: rounding errors are evenly spread over
#: a step, which for floats is 2⁻⁷ (BF16) or 2⁻¹⁰ (FP16) of the number, on average half of that.
_OWN_NOISE: Mapping[Precision, float] = {
    Precision.INT8: 1e-5,  # of weights that are rounded channel by channel
    Precision.BF16: 2.0**-16 / 12,
    Precision.FP16: 2.0**-22 / 12,
    Precision.FP32: 0.0,
}
#: Where it was not measured, an op takes time as its values take bits, and one conversion of a
#: tensor this share of what an op takes in FP32.
_CONVERSION = 0.05
#: An emulated precision is taken to take more than FP32's time, unless its time was measured.
_EMULATED = 1.1
#: INT8 is taken to lose only where it is this much slower: single ops are timed roughly, and of a
#: kernel for integers a part of the time is conversions that its neighbours may spare.
_INT8_MIN_SLOWDOWN = 1.2
#: What it takes of FP32's time at most where it does not.
_INT8_ASSUMED_TIME_RATIO = 0.95
#: What the bytes of all weights are worth where speed is wanted, as a share of FP32's time. They
#: count for weights that are stored in INT8 and not multiplied so, which gains next to no time: of
#: two plans that are about as fast, it is the smaller one.
_SIZE_WEIGHT = 0.05


@dataclass(frozen=True)
class CostInputs:
    """What a cost model is made of, beside the space.

    Attributes:
        sensitivities: quantized tensor → the harm of storing it in INT8.
        objectives: what is made small → its weight: `performance`, `footprint`, `modelsize`.
        times: what was measured.
        weights: op → numbers in its weights.
        values: tensor → numbers it holds for one sample.
        in_place: whether ops were timed within a plan that was tried: small differences then count.
    """

    sensitivities: Mapping[str, float]
    objectives: Mapping[Objective, float] = field(
        default_factory=lambda: {Objective.PERFORMANCE: 1.0}
    )
    times: OpTimings = field(default_factory=OpTimings)
    weights: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)
    in_place: bool = False

    def shares(self, ops: Iterable[str]) -> dict[str, tuple[float, float]]:
        """Op → its shares of the time and of the weights of all in FP32; equal ones if unknown."""
        ops = list(ops)
        times = _shares(self.seconds(ops))
        sizes = [self.weights.get(op, 0) for op in ops]
        whole = sum(sizes)
        weights = [size / whole if whole else 1 / len(ops) for size in sizes]
        return dict(zip(ops, zip(times, weights, strict=True), strict=True))

    def for_size_alone(self, plan: PrecisionPlan) -> frozenset[str]:
        """Ops of which a plan stores the weight in INT8, and which gain less time than bytes.

        None where times are not known, or where anything but time counts.
        """
        bytes_of_all, seconds_of_all = sum(self.weights.values()), sum(self.seconds(self.times.ops))
        if not is_latency_only(self.objectives) or not bytes_of_all or not seconds_of_all:
            return frozenset()
        alone = [op for op, config in plan.items() if config.approach is Approach.WEIGHT_ONLY]

        def gain(op: str, seconds: float) -> float:
            saved = seconds * (1 - self.speed(op, Precision.INT8, False)) / seconds_of_all
            return saved - _SIZE_WEIGHT * self.weights.get(op, 0) / bytes_of_all

        return frozenset(
            op
            for op, seconds in zip(alone, self.seconds(alone), strict=True)
            if gain(op, seconds) <= 0
        )

    def seconds(self, ops: Iterable[str]) -> list[float]:
        """What each op takes in FP32; 0 where that was not measured."""
        return [self.times.ops.get(op, {}).get(Precision.FP32, 0.0) for op in ops]

    def speed(self, op: str, precision: Precision, emulated: bool) -> float:
        """How long an op takes, as a share of its time in FP32."""
        measured = self.times.ops.get(op, {})
        unknown = precision not in measured or not measured.get(Precision.FP32)
        if unknown or precision is Precision.FP32:
            return _EMULATED if emulated else precision.bits / 32
        found = measured[precision] / measured[Precision.FP32]
        doubtful = precision is Precision.INT8 and found <= _INT8_MIN_SLOWDOWN and not self.in_place
        return min(found, _INT8_ASSUMED_TIME_RATIO) if doubtful else found


def _shares(amounts: Sequence[float]) -> list[float]:
    """Amounts as shares of their sum; what is not known counts like the middle of the rest."""
    known = [amount for amount in amounts if amount > 0]
    middle = median(known) if known else 1.0
    filled = [amount or middle for amount in amounts]
    whole = sum(filled)
    return [amount / whole for amount in filled]


@dataclass(frozen=True)
class CostModel:
    """A tuning space as an assignment problem.

    Attributes:
        space: the space.
        levels: its precisions, fewest bits first.
        assignment: the decided ops with their costs.
    """

    space: TuningSpace
    levels: tuple[Precision, ...]
    assignment: Assignment

    def at(self, levels: Mapping[Node, int]) -> ParetoPoint:
        """An assignment with what it costs."""
        return ParetoPoint(levels, *self.assignment.cost(levels))

    def point(self, plan: PrecisionPlan) -> ParetoPoint:
        """A plan with what it costs; what it leaves open counts as FP32."""
        level = {precision: index for index, precision in enumerate(self.levels)}
        said = plan.precisions
        return self.at({op: level[said.get(op, Precision.FP32)] for op in self.space.tunable_ops})

    def plan(self, levels: Mapping[Node, int]) -> PrecisionPlan:
        """The plan of an assignment.

        Ops that run in a 16-bit precision only where the ops around them do are left out there:
        they follow.
        """
        chosen = {
            op: self.space.choice(op, self.levels[levels[op]]) for op in self.space.tunable_ops
        }
        return PrecisionPlan({op: config for op, config in chosen.items() if config is not None})


def cost_model(space: TuningSpace, figures: CostInputs) -> CostModel:
    """Bring together what is known of a space.

    Time is counted in shares of what the whole model takes in FP32; so are bytes, where size is
    what matters. The noise of a quantized tensor is paid once, where any op reads it in INT8, or
    its writer can write nothing else: so putting one of several readers back gains nothing, and
    all of them, or none, go back.

    Args:
        space: what every op may run in.
        figures: what was measured of it.
    """
    present = {*space.usable_precisions, Precision.FP32}
    levels = tuple(sorted(present, key=lambda p: (p.bits, list(Precision).index(p))))
    shares = figures.shares(space.tunable_ops)
    costs: dict[Node, tuple[Cost, ...]] = {
        op: tuple(_cost(space.capabilities[op], op, level, figures, shares[op]) for level in levels)
        for op in space.tunable_ops
    }
    shared = _noise_and_conversions(space, figures) if Precision.INT8 in levels else ()
    return CostModel(space, levels, Assignment(costs, tuple(shared)))


def _cost(
    capability: Capability,
    op: str,
    precision: Precision,
    figures: CostInputs,
    shares: tuple[float, float],
) -> Cost:
    config = capability.config(precision)
    if config is None:
        return inf, 0.0
    time, weight = shares
    time *= figures.speed(op, precision, precision in capability.emulated)
    speed = figures.objectives.get(Objective.PERFORMANCE, 0.0)
    low = capability.config(Precision.INT8)
    alone = low is not None and low.approach is Approach.WEIGHT_ONLY
    size = max(1 - speed, _SIZE_WEIGHT if alone else 0.0)
    cost = speed * time + size * weight * precision.bits / 32
    return cost, _OWN_NOISE[precision]


def _noise_and_conversions(space: TuningSpace, figures: CostInputs) -> Iterator[SharedCost]:
    """All at the bound between INT8, the lowest level, and the others."""
    cost = _conversion_cost(space, figures)
    for tensor in space.tensors:
        conversion = (cost(tensor.name), 0.0)
        yield SharedCost(
            (0.0, figures.sensitivities.get(tensor.name, 0.0)), 1, tensor.quantizing_ops
        )
        for writer in tensor.producers:
            yield SharedCost(conversion, 1, tensor.consumers, below=True, and_not=writer)
            yield SharedCost(conversion, 1, tensor.consumers, below=False, and_not=writer)
        if not tensor.producers:
            yield SharedCost(conversion, 1, tensor.consumers)


def _conversion_cost(space: TuningSpace, figures: CostInputs) -> Callable[[str], float]:
    """Tensor → what converting it once costs."""
    importance, times = figures.objectives.get(Objective.PERFORMANCE, 0.0), figures.times
    whole = sum(figures.seconds(space.tunable_ops))
    if times.conversion is None or whole <= 0:
        estimate = importance * _CONVERSION / max(len(space.tunable_ops), 1)
        return lambda tensor: estimate
    least, each = times.conversion, times.per_element
    return lambda name: importance * (least + each * figures.values.get(name, 0.0)) / whole


def predicted_share(space: TuningSpace, figures: CostInputs, plan: PrecisionPlan) -> float | None:
    """Return the time of a plan's model by the times of single ops, as a share of FP32's.

    Ops that are not decided take what they take in FP32. None where times are not known.
    """
    whole, decided = figures.times.whole, sum(figures.seconds(space.tunable_ops))
    if not whole or not decided:
        return None
    in_place = replace(figures, objectives={Objective.PERFORMANCE: 1.0}, in_place=True)
    share = cost_model(space, in_place).point(plan).time
    return 1 - (1 - share) * min(1.0, decided / whole)


def without_tensors(
    space: TuningSpace, plan: PrecisionPlan, tensors: Iterable[QuantizedTensor]
) -> PrecisionPlan:
    """A plan with what stores any of these tensors in INT8 in the best of its other choices."""
    return without_int8(space, plan, {op for tensor in tensors for op in tensor.quantizing_ops})


def without_int8(space: TuningSpace, plan: PrecisionPlan, ops: Iterable[str]) -> PrecisionPlan:
    """A plan with these ops in the best of their other choices."""
    return plan.replacing(
        {op: next(c for c in space.choices(op) if c.precision is not Precision.INT8) for op in ops}
    )
