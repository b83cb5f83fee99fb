"""`auto_mixed_precision`: 16 bits and FP32 only, back by type, then op by op from the outputs."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import replace
from math import inf

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.strategies.base import Search, TuningProblem
from neural_mp.strategies.basic import Basic, fallback_groups, op_by_op


class AutoMixedPrecision(Basic):
    """The strategy Intel Neural Compressor calls `auto_mixed_precision`. INT8 is never used.

    1. All ops on the ALLOW list in 16 bits, and what follows them by the four lists; where both
       BF16 and FP16 were asked for, in each, and of those the one that lost less is the base.
    2. One op type after the other back to FP32, types that only follow among them.
    3. Each op back alone, from the outputs to the inputs, until one meets the target; if none
       does, again in order of what each gained, those before included. Within the type that
       helped, if one did.
    4. When that met the target, what brought nothing on the way is in 16 bits again.

    The published strategy ends with the first plan that meets the target, so a type that helped
    stays in FP32 as a whole, and there is no step 4.

    Without INT8 no ops share a quantized tensor, so each is decided by itself. Where no 16-bit
    precision was asked for, nothing is proposed.

    Source: `strategy/auto_mixed_precision.py`.
    """

    name = "auto_mixed_precision"

    def search(self, problem: TuningProblem) -> Search:
        """See the class."""
        base: tuple[TuningProblem, PrecisionPlan] | None = None
        least_harm = inf
        for precision in (p for p in problem.precisions if p.is_16_bit):
            narrowed = _narrowed(problem, precision)
            plan = narrowed.space.fastest_plan()
            if not narrowed.space.resolve(plan).has_low_precision:
                continue
            (trial,) = yield [plan]
            if trial.met:
                return
            if base is None or trial.ranking_loss < least_harm:
                base, least_harm = (narrowed, plan), trial.ranking_loss
        if base is not None:
            yield from self.fall_back(*base)

    def by_op(
        self,
        problem: TuningProblem,
        base: PrecisionPlan,
        helped: frozenset[str],
        target: Precision,
    ) -> Generator[list[PrecisionPlan], list[Trial], bool]:
        """Steps 3 and 4; whether the target was met."""
        units = fallback_groups(problem, base, helped)
        return (yield from op_by_op(problem, base, units[::-1], target))


def _narrowed(problem: TuningProblem, precision: Precision) -> TuningProblem:
    space = problem.space.restricted_to([precision])
    return replace(problem, space=space, precisions=(precision,))
