"""`mse`: as `basic`, with the ops back in order of the error that each alone causes."""

from __future__ import annotations

from collections.abc import Generator

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.strategies.base import TuningProblem
from neural_mp.strategies.basic import Basic, lowered_ops
from neural_mp.strategies.decisions import (
    Decision,
    fall_back_one_by_one,
    low_decisions,
    noise_read,
    output_noises,
)


class Mse(Basic):
    """The strategy Intel Neural Compressor calls `mse`.

    1. and 2. as in `basic`: everything low, with each calibration algorithm; then by type.
    3. The error that each decision causes is measured, with it alone low.
    4. Decisions go back in that order, worst first, and stay back, until the target is met;
       within the type that helped, if one did.

    The published strategy compares each op's own output with what it is in FP32 (mean squared
    error). Here what arrives at the model's outputs counts, as a share of their power: an error
    that later ops amplify or take away is worth that much more or less. Where this cannot be
    measured, decisions are ranked by the noise that calibration saw in what they read; where that
    is unknown as well, step 4 is that of `basic`.

    Source: `tuning_strategies.md`, "MSE".
    """

    name = "mse"

    def by_op(
        self,
        problem: TuningProblem,
        base: PrecisionPlan,
        helped: frozenset[str],
        target: Precision,
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Steps 3 and 4; whether the target was met."""
        low = low_decisions(problem, base)
        decisions = [ops for ops in low if not helped or not helped.isdisjoint(ops)]
        # Types that only follow others into 16 bits may have helped, too.
        decisions += [(op,) for op in sorted(helped.difference(lowered_ops(problem, base)))]
        scores = _scores(problem, base, decisions)
        if not any(scores.values()):
            return (yield from super().by_op(problem, base, helped, target))
        order = sorted(decisions, key=lambda ops: -scores[ops])
        return (yield from fall_back_one_by_one(problem, base, order, target))


def _scores(
    problem: TuningProblem, base: PrecisionPlan, decisions: list[Decision]
) -> dict[Decision, float]:
    """Decision → the error that it causes."""
    names = [ops[0] for ops in decisions]
    noises = output_noises(problem, (_alone(problem, base, ops) for ops in decisions), names)
    if noises is None:
        noises = [noise_read(problem, ops) for ops in decisions]
    return dict(zip(decisions, noises, strict=True))


def _alone(problem: TuningProblem, base: PrecisionPlan, ops: Decision) -> PrecisionPlan:
    """A plan with only these ops as low as they are in the base."""
    effective = problem.space.resolve(base).effective
    low = {op: base.get(op) or OpConfig(effective[op]) for op in ops}
    return PrecisionPlan({**dict.fromkeys(problem.space.tunable_ops, FP32), **low})
