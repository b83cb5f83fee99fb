"""`exhaustive`: every plan there is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from neural_mp.core.plan import PrecisionPlan
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.decisions import combinations, levels, plan_of

#: Plans a round: none depends on the trial of another.
_ROUND = 8


class Exhaustive(Strategy):
    """The strategy Intel Neural Compressor calls `exhaustive`.

    Every combination of the precisions of all decisions: all as low as they can, then with one
    decision raised, with two, and so on; within that in the graph's order, the lower precision
    first. So what `max_trials` cuts off is what gains least.

    It does not end with a plan that meets the target, but when all were proposed: 2ⁿ - 1 for n
    decisions between INT8 and FP32. For models with few decisions, or to check another strategy.

    The published strategy goes through the ways of INT8 and leaves precisions alone; here it is the
    other way round, since these are what a plan is about.

    Source: `tuning_strategies.md`, "Exhaustive".
    """

    name = "exhaustive"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        plans = _all_plans(problem.space)
        while together := list(itertools.islice(plans, _ROUND)):
            yield together


def _all_plans(space: TuningSpace) -> Iterator[PrecisionPlan]:
    tried: set[ResolvedPlan] = set()
    for combination in combinations([levels(space, ops) for ops in space.decision_groups]):
        plan = plan_of(space, combination)
        resolved = space.resolve(plan)
        # Two combinations are one plan where an op has nothing to follow.
        if resolved not in tried and resolved.has_low_precision:
            tried.add(resolved)
            yield plan
