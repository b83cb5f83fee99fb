"""`exhaustive`: all plans."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from neural_mp.core.plan import PrecisionPlan
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.decisions import NewPlans, decision_levels, iterate_combinations

#: Plans per round.
_ROUND = 8


class Exhaustive(Strategy):
    """Intel Neural Compressor's `exhaustive`.

    Every combination of the precisions of all decisions: the lowest first, then with one decision
    raised, with two, and so on; ties in the graph's order, the lower precision first. So
    `max_trials` cuts off the plans with the least gain.

    The search ends when all plans were proposed, even if one meets the target: 2ⁿ - 1 plans for n
    decisions between INT8 and FP32; or after 1000 combinations in a row without a new plan.
    Intended for models with few decisions, or as a reference for other strategies.

    The published strategy enumerates INT8 approaches; this one enumerates precisions.

    Source: `tuning_strategies.md`, "Exhaustive".
    """

    name = "exhaustive"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        plans = _iterate_all_plans(problem.space)
        while together := list(itertools.islice(plans, _ROUND)):
            yield together


def _iterate_all_plans(space: TuningSpace) -> Iterator[PrecisionPlan]:
    plans = NewPlans(space)
    for combination in iterate_combinations(
        [decision_levels(space, ops) for ops in space.decision_groups]
    ):
        plan = plans.make_new_plan(combination)
        if plan is not None:
            yield plan
        elif plans.is_exhausted:
            return
