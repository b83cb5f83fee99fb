"""The plans that `mincut` starts from, fastest first by latencies of whole models."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from neural_mp.core.enums import Objective
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.search.cost_model import CostModel
from neural_mp.strategies.base import TuningProblem

#: A plan counts as faster below this ratio of measured latencies, or of predicted ones, if minimal.
_FASTER, _PREDICTED_AS_FASTER = 0.97, 0.85


@dataclass(frozen=True)
class FirstPlans:
    """The plans that come first.

    Attributes:
        fastest: the plan with the lowest precisions, or one that is clearly faster.
        as_fast: a plan with less INT8 that was measured as no slower than the lowest precisions.
    """

    fastest: PrecisionPlan
    as_fast: PrecisionPlan | None = None


def first_plans(
    problem: TuningProblem, model: CostModel, finished: Callable[[PrecisionPlan], PrecisionPlan]
) -> FirstPlans:
    """Return the plans to start from.

    Args:
        problem: has the space and the probe.
        model: predicts the time of plans.
        finished: completes a plan by corrections.
    """
    space, low = problem.space, problem.space.fastest_plan()
    lowest = space.resolve(finished(low))
    resolved = {plan: space.resolve(finished(plan)) for plan in _faster_by_ops(low, model)}
    candidates = [p for p, r in resolved.items() if r.has_low_precision and r != lowest]
    if not candidates:
        return FirstPlans(low)
    if Objective.PERFORMANCE not in problem.objectives:
        return FirstPlans(candidates[0])
    seconds = problem.probe.latencies([finished(plan) for plan in (low, *candidates)])
    if seconds is None:
        baseline, least = (model.cost(plan)[0] for plan in (low, candidates[0]))
        return FirstPlans(candidates[0] if least < baseline * _PREDICTED_AS_FASTER else low)
    baseline, *measured = seconds
    least, best = min(zip(measured, candidates, strict=True), key=lambda pair: pair[0])
    if least < baseline * _FASTER:
        return FirstPlans(best)
    return FirstPlans(low, best if least <= baseline else None)


def _faster_by_ops(low: PrecisionPlan, model: CostModel) -> Iterator[PrecisionPlan]:
    """Yield the minimum cut, and the lowest precisions except for ops that the cut speeds up.

    Most ops without INT8 take too little time to tell two float precisions apart, while a change
    from one to the other between two ops costs more than it gains. So these ops take the precisions
    of the cut first, and then the lowest float precision.
    """
    cut = model.best_plan(0.0)
    yield cut

    def op_time(op: str, plan: PrecisionPlan) -> float:
        return model.assignment.costs[op][model.levels.index(plan[op].precision)][0]

    in_int8 = [op for op in low if low[op].precision is Precision.INT8 and op in cut]
    faster = [op for op in in_int8 if op_time(op, cut) < op_time(op, low)]
    yield low.replacing({op: cut[op] for op in faster})
    yield low.replacing({op: _lowest_float(op, model) for op in faster})


def _lowest_float(op: str, model: CostModel) -> OpConfig:
    floats = (model.space.choice(op, level) for level in model.levels if not level.is_integer)
    return next(config for config in floats if config is not None)
