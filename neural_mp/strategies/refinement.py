"""Plans that differ from one in a single decision, and the fastest of them measured as wholes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.search.cost_model import CostInputs, cost_model
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Probe
from neural_mp.strategies.basic import at_precision
from neural_mp.strategies.decisions import levels

#: Plans measured beside one, and how often the fastest of them is what others are measured beside.
_NEIGHBOURS, _MAX_ROUNDS = 6, 4
#: Fewer of them where the time for measuring does not suffice.
_FEW_NEIGHBOURS = 2
#: A plan is faster if it takes less than this share of the other's time.
_FASTER = 0.99


def neighbours(
    space: TuningSpace, plan: PrecisionPlan, figures: CostInputs, may_lower: bool
) -> list[PrecisionPlan]:
    """Return the plans that differ from a plan in one decision, fastest by single ops first.

    Args:
        space: what every op may run in.
        plan: the plan.
        figures: times of ops and conversions.
        may_lower: whether decisions are lowered, too; otherwise they are only put back.
    """
    model = cost_model(space, figures)
    found = dict.fromkeys(_changed(space, plan, may_lower))
    return sorted(found, key=lambda other: model.point(other).time)


def _changed(space: TuningSpace, plan: PrecisionPlan, may_lower: bool) -> Iterator[PrecisionPlan]:
    precisions = plan.precisions
    for ops in space.decision_groups:
        bits = max(precisions.get(op, Precision.FP32).bits for op in ops)
        for level in levels(space, ops):
            if level.bits > bits or (may_lower and level.bits < bits):
                yield at_precision(space, plan, ops, level)


def fastest_nearby(
    probe: Probe,
    plan: PrecisionPlan,
    candidates: Callable[[PrecisionPlan], Sequence[PrecisionPlan]],
) -> PrecisionPlan | None:
    """Measure plans beside a plan, go on from the fastest, and return where that ends.

    Args:
        probe: measures plans.
        plan: where to begin.
        candidates: plan → the plans to measure beside it, most promising first.

    Returns:
        A plan that runs faster; the plan itself where none does; None where that cannot be
        measured.
    """
    for _ in range(_MAX_ROUNDS):
        faster = _search_faster(probe, plan, candidates(plan))
        if faster is None or faster == plan:
            return faster
        plan = faster
    return plan


def _search_faster(
    probe: Probe, plan: PrecisionPlan, candidates: Sequence[PrecisionPlan]
) -> PrecisionPlan | None:
    if not candidates:
        return plan
    for most in (_NEIGHBOURS, _FEW_NEIGHBOURS):
        seconds = probe.latencies([plan, *candidates[:most]])
        if seconds is not None:
            before, *after = seconds
            least = min(after)
            return candidates[after.index(least)] if least < before * _FASTER else plan
    return None


def only(plan: PrecisionPlan, ops: Iterable[str]) -> PrecisionPlan:
    """A plan with all but these ops in FP32."""
    kept = set(ops)
    return plan.replacing({op: FP32 for op in plan if op not in kept})
