"""`mse_v2`: the decision that relieves the outputs most goes back, then the mildest returns."""

from __future__ import annotations

from collections.abc import Generator

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import at_precision, fallback_precisions
from neural_mp.strategies.decisions import (
    Decision,
    low_decisions,
    noise_read,
    output_noises,
)

#: Decision → the plan with that decision moved.
Candidates = dict[Decision, PrecisionPlan]


class MseV2(Strategy):
    """The strategy Intel Neural Compressor calls `mse_v2`: fallback, then revert.

    1. Everything as low as it can.
    2. Fallback: every low decision is scored by how much the noise at the outputs falls when it
       alone goes back; the one with the highest score goes back, and is tried. All are scored
       anew, until the target is met.
    3. Revert: of what went back, each is scored by the noise when it is low again; the one that
       harms least returns, and is tried; and so on, until one misses the target.

    Scores cost no evaluation, but a measurement on a few samples for every low decision in every
    step. Where noise at the outputs is not to be had, or no more of it, the noise that calibration
    saw in what an op reads ranks in its place.

    Fallback is to the 16-bit precision first, where one was asked for, then to FP32.

    Source: `tuning_strategies.md`, "MSE_V2", and `strategy/mse_v2.py`.
    """

    name = "mse_v2"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        base = problem.space.fastest_plan()
        resolved = problem.space.resolve(base)
        if not resolved.has_low_precision:
            return
        (trial,) = yield [base]
        if trial.met:
            return
        tried = {resolved}
        for target in fallback_precisions(problem):
            plan, raised = yield from _fall_back(problem, base, target, tried)
            if plan is not None:
                yield from _revert(problem, base, plan, raised, tried)
                return


def _fall_back(
    problem: TuningProblem, base: PrecisionPlan, target: Precision, tried: set[ResolvedPlan]
) -> Generator[list[PrecisionPlan], list[Trial], tuple[PrecisionPlan | None, list[Decision]]]:
    """Step 2: the first plan that meets the target, None if there is none; what went back in it."""
    space, plan = problem.space, base
    remaining = low_decisions(problem, base)
    raised: list[Decision] = []
    while remaining:
        moved = {ops: at_precision(space, plan, ops, target) for ops in remaining}
        ops = _quietest(problem, moved, lowered=False)
        remaining.remove(ops)
        raised.append(ops)
        plan = moved[ops]
        resolved = space.resolve(plan)
        if not resolved.has_low_precision:
            break
        if resolved in tried:
            continue
        tried.add(resolved)
        (trial,) = yield [plan]
        if trial.met:
            return plan, raised
    return None, raised


def _revert(
    problem: TuningProblem,
    base: PrecisionPlan,
    plan: PrecisionPlan,
    raised: list[Decision],
    tried: set[ResolvedPlan],
) -> Search:
    """Step 3, from the plan that met the target."""
    space, left = problem.space, list(raised)
    while True:
        moved = {ops: plan.replacing({op: base[op] for op in ops}) for ops in left}
        # What is known to miss the target, such as what the last fallback set out from.
        moved = {ops: other for ops, other in moved.items() if space.resolve(other) not in tried}
        if not moved:
            return
        ops = _quietest(problem, moved, lowered=True)
        left.remove(ops)
        plan = moved[ops]
        tried.add(space.resolve(plan))
        (trial,) = yield [plan]
        if not trial.met:
            return


def _quietest(problem: TuningProblem, moved: Candidates, *, lowered: bool) -> Decision:
    """The decision with whose move the noise at the outputs is least.

    Where that is unknown, or the same, what calibration saw in what the decision reads counts:
    little where the move lowers it, much where it raises it.
    """
    sign = 1 if lowered else -1
    noises = output_noises(problem, moved.values()) or [0.0] * len(moved)
    at_outputs = dict(zip(moved, noises, strict=True))
    return min(moved, key=lambda ops: (at_outputs[ops], sign * noise_read(problem, ops)))
