"""`mse`: like `basic`, with fallback in the order of the error that each op causes."""

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
    """Intel Neural Compressor's `mse`.

    1. and 2. as in `basic`: lowest precisions with each calibration algorithm; then by type.
    3. The error of each decision is measured with only that decision in lower precision.
    4. Decisions fall back cumulatively, worst first, until the target is met; if a type helped in
       step 2, only its decisions.

    The published strategy computes the mean squared error of each op's own output. This one
    measures the NSR at the model's outputs, which includes amplification and attenuation by later
    ops. If output noise is unavailable, decisions are ranked by the noise of the tensors that they
    read; without that, step 4 is that of `basic`.

    Source: `tuning_strategies.md`, "MSE".
    """

    name = "mse"

    def by_op(
        self, problem: TuningProblem, base: PrecisionPlan, helped: frozenset[str], target: Precision
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Run steps 3 and 4; return whether a plan met the target."""
        low = low_decisions(problem, base)
        decisions = [ops for ops in low if not helped or not helped.isdisjoint(ops)]
        # Types that only follow others into 16 bits may have helped, too.
        decisions += [(op,) for op in sorted(helped.difference(lowered_ops(problem, base)))]
        scores = _decision_errors(problem, base, decisions)
        if not any(scores.values()):
            return (yield from super().by_op(problem, base, helped, target))
        order = sorted(decisions, key=lambda ops: -scores[ops])
        return (yield from fall_back_one_by_one(problem, base, order, target))


def _decision_errors(
    problem: TuningProblem, base: PrecisionPlan, decisions: list[Decision]
) -> dict[Decision, float]:
    effective = problem.space.resolve(base).effective
    fp32 = dict.fromkeys(problem.space.tunable_ops, FP32)
    plans = (
        PrecisionPlan({**fp32, **{op: base.get(op) or OpConfig(effective[op]) for op in ops}})
        for ops in decisions
    )
    noises = output_noises(problem, plans, [ops[0] for ops in decisions])
    if noises is None:
        noises = [noise_read(problem, ops) for ops in decisions]
    return dict(zip(decisions, noises, strict=True))
