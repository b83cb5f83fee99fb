"""`conservative` and `exhaustive`: searches that need no measured sensitivity."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterator

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import list_lowered_ops, set_op_precision
from neural_mp.strategies.decisions import Decision, NewPlans, decision_levels, iterate_combinations

#: Op types tried first, in this order: substrings of the names in all frameworks.
_FIRST = ("conv", "matmul", "linear", "gemm", "dense")
#: Plans per round.
_ROUND = 8


class Conservative(Strategy):
    """Intel Neural Compressor's conservative tuning, its quantization level 0.

    1. From FP32, lower all ops of one type to the lowest precision: convolutions, then matrix
       products, then the other types, those with most ops first.
    2. Keep the type low if the plan still meets the accuracy target; otherwise revert it to FP32.
    3. Continue with every type, whatever the result of those before.
    4. Repeat with each 16-bit precision for the ops that are still in FP32.

    Ops that read one quantized tensor are lowered together, with the first of their types. Latency
    is ignored during the search, since the next type may make a slow plan fast.

    Source: `tuning_strategies.md`, "Conservative Tuning", and `strategy/conservative.py`, which is
    limited to convolutions and matrix products.
    """

    name = "conservative"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        space = problem.space
        accepted = PrecisionPlan(dict.fromkeys(space.tunable_ops, FP32))
        types = _decisions_by_type(space)
        tried: set[ResolvedPlan] = set()
        for precision in space.usable_precisions:
            if precision is Precision.FP32:
                continue
            for decisions in types:
                low = set(list_lowered_ops(problem, accepted))
                unlowered = [op for ops in decisions if low.isdisjoint(ops) for op in ops]
                plan = set_op_precision(space, accepted, unlowered, precision)
                resolved = space.resolve(plan)
                if resolved in tried or not resolved.has_low_precision:
                    continue
                tried.add(resolved)
                (trial,) = yield [plan]
                if trial.meets_accuracy:
                    accepted = plan


def _decisions_by_type(space: TuningSpace) -> list[list[Decision]]:
    """Return the decisions of each op type, in the order of trials."""
    counts = Counter(space.graph[op].type for op in space.tunable_ops)

    def rank_op_type(op_type: str) -> tuple[int, int, str]:
        name = op_type.lower()
        first = next((i for i, part in enumerate(_FIRST) if part in name), len(_FIRST))
        return first, -counts[op_type], op_type

    order = {op_type: index for index, op_type in enumerate(sorted(counts, key=rank_op_type))}
    by_type: list[list[Decision]] = [[] for _ in order]
    for ops in space.decision_groups:
        by_type[min(order[space.graph[op].type] for op in ops)].append(ops)
    return by_type


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
