"""What a tuning space costs: time and harm of every op in every precision, and of conversions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import inf

from neural_mp.observations import Observations
from neural_mp.plan import PrecisionPlan
from neural_mp.precision import FP32, Precision
from neural_mp.search.cut import Assignment, Cost, Node, SharedCost
from neural_mp.search.front import Point
from neural_mp.space import Capability, TuningSpace

#: Noise power relative to the signal that an op itself adds: rounding errors are evenly spread over
#: a step, which for floats is 2⁻⁷ (BF16) or 2⁻¹⁰ (FP16) of the number, on average half of that.
_OWN_NOISE: Mapping[Precision, float] = {
    Precision.INT8: 1e-5,  # of weights that are rounded channel by channel
    Precision.BF16: 2.0**-16 / 12,
    Precision.FP16: 2.0**-22 / 12,
    Precision.FP32: 0.0,
}
#: An op takes time as its values take bits, and one conversion of a tensor this share of it.
_CONVERSION = 0.05
#: An emulated precision is right and slow.
_EMULATED = 1.1


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

    def at(self, levels: Mapping[Node, int]) -> Point:
        """An assignment with what it costs."""
        return Point(levels, *self.assignment.cost(levels))

    def point(self, plan: PrecisionPlan) -> Point:
        """A plan with what it costs; what it leaves open counts as FP32."""
        level = {precision: index for index, precision in enumerate(self.levels)}
        said = plan.precisions
        return self.at({op: level[said.get(op, Precision.FP32)] for op in self.space.decided})

    def plan(self, levels: Mapping[Node, int]) -> PrecisionPlan:
        """The plan of an assignment.

        Ops that run in a 16-bit precision only where the ops around them do are left out there:
        they follow.
        """
        chosen = {op: self.space.choice(op, self.levels[levels[op]]) for op in self.space.decided}
        return PrecisionPlan({op: config for op, config in chosen.items() if config is not None})


def cost_model(space: TuningSpace, observations: Observations) -> CostModel:
    """Bring together what is known of a space.

    The noise of a quantized tensor is paid once, where any op reads it in INT8, or its writer can
    write nothing else: so putting one of several readers back gains nothing, and all of them, or
    none, go back.

    Args:
        space: what every op may run in.
        observations: the noise of the tensors.
    """
    present = {*space.precisions(), Precision.FP32}
    levels = tuple(sorted(present, key=lambda p: (p.bits, list(Precision).index(p))))
    costs: dict[Node, tuple[Cost, ...]] = {
        op: tuple(_cost(space.capabilities[op], precision) for precision in levels)
        for op in space.decided
    }
    shared = _noise_and_conversions(space, observations) if Precision.INT8 in levels else ()
    return CostModel(space, levels, Assignment(costs, tuple(shared)))


def _cost(capability: Capability, precision: Precision) -> Cost:
    if capability.config(precision) is None:
        return inf, 0.0
    time = _EMULATED if precision in capability.emulated else precision.bits / 32
    return time, _OWN_NOISE[precision]


def _noise_and_conversions(space: TuningSpace, observations: Observations) -> Iterator[SharedCost]:
    """All at the bound between INT8, the lowest level, and the others."""
    conversion = (_CONVERSION, 0.0)
    for tensor in space.tensors:
        noise = observations.noise.get(tensor.name, 0.0)
        yield SharedCost((0.0, noise), 1, space.stored_by(tensor))
        for writer in tensor.producers:
            yield SharedCost(conversion, 1, tensor.consumers, below=True, and_not=writer)
            yield SharedCost(conversion, 1, tensor.consumers, below=False, and_not=writer)
        if not tensor.producers:
            yield SharedCost(conversion, 1, tensor.consumers)


def without_noisy_tensors(
    model: CostModel, observations: Observations, threshold: float
) -> PrecisionPlan:
    """All low, but a precision higher what shares a tensor with more noise than `threshold`."""
    space = model.space
    raised: set[str] = set()
    for tensor in space.tensors:
        if observations.noise.get(tensor.name, 0.0) > threshold:
            raised.update(space.stored_by(tensor))
    changes = {}
    for op in raised:
        higher = [c for c in space.choices(op) if c.precision is not Precision.INT8]
        changes[op] = higher[0] if higher else FP32
    return space.fastest_plan().replacing(changes)
