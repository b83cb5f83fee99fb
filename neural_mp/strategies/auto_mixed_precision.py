"""`auto_mixed_precision`: 16 bits and FP32; fallback by type, then op by op from the outputs."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from math import inf

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.strategies.base import Search, TuningProblem
from neural_mp.strategies.basic import Basic, op_by_op, order_fallback_groups


class AutoMixedPrecision(Basic):
    """Intel Neural Compressor's `auto_mixed_precision`, which never uses INT8.

    1. Put all ops on the ALLOW list in 16 bits; others follow by the four lists. If both BF16 and
       FP16 were requested, try each and continue from the one with the smaller loss.
    2. One op type after the other falls back to FP32, including types that only follow.
    3. Each op falls back alone, from the outputs to the inputs, until a plan meets the target;
       otherwise cumulatively, in order of their gain. If a type helped in step 2, only its ops.
    4. If a plan of step 3 meets the target, ops whose fallback had no effect return to 16 bits.

    The published strategy ends with the first plan that meets the target, so a type that helped
    stays in FP32 as a whole, without step 4.

    Without INT8 no ops share a quantized tensor, so each op is decided individually. If no 16-bit
    precision was requested, nothing is proposed.

    Source: `strategy/auto_mixed_precision.py`.
    """

    name = "auto_mixed_precision"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        base: tuple[TuningProblem, PrecisionPlan] | None = None
        least_loss = inf
        for precision in (p for p in problem.precisions if p.is_16_bit):
            space = problem.space.restricted_to([precision])
            narrowed = replace(problem, space=space, precisions=(precision,))
            plan = space.fastest_plan()
            if not space.resolve(plan).has_low_precision:
                continue
            (trial,) = yield [plan]
            if trial.met:
                return
            if base is None or trial.ranking_loss < least_loss:
                base, least_loss = (narrowed, plan), trial.ranking_loss
        if base is not None:
            yield from self.fall_back(*base)

    def by_op(
        self, problem: TuningProblem, base: PrecisionPlan, helped: frozenset[str], target: Precision
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Run steps 3 and 4; return whether a plan met the target."""
        groups = order_fallback_groups(problem, base, helped)
        return (yield from op_by_op(problem, base, groups[::-1], target))
