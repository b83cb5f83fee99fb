"""`hawq_v2`: back in the order of how sharply the loss bends along each weight."""

from __future__ import annotations

from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import fallback_precisions
from neural_mp.strategies.decisions import (
    fall_back_one_by_one,
    low_decisions,
    noise_read,
)


class HawqV2(Strategy):
    """The strategy Intel Neural Compressor calls `hawq_v2`.

    1. Everything as low as it can.
    2. Every op with a weight is scored once: the trace of the loss's second derivatives by its
       weight, times the squared error of rounding that weight to INT8. Of ops that move together
       scores add up. It needs gradients, so not all frameworks have it.
    3. Decisions go back in that order, highest score first, and stay back, until the target is
       met. What has no weight comes last, in order of the noise that calibration saw in what it
       reads.

    Fallback is to the 16-bit precision first, where one was asked for, then to FP32.

    Sources: Dong et al., "HAWQ-V2: Hessian Aware trace-Weighted Quantization of Neural Networks",
    NeurIPS 2020, for the score; `tuning_strategies.md`, "HAWQ_V2", for what is done with it. The
    paper chooses among bit widths by it instead, and that publication scores by the trace alone.
    """

    name = "hawq_v2"

    def search(self, problem: TuningProblem) -> Search:
        """See the class.

        Raises:
            ConversionError: the framework has no gradients.
        """
        base = problem.space.fastest_plan()
        if not problem.space.resolve(base).has_low_precision:
            return
        (trial,) = yield [base]
        if trial.met:
            return
        scores = problem.probe.weight_sensitivity()

        def worst_first(ops: tuple[str, ...]) -> tuple[float, float]:
            return -sum(scores.get(op, 0.0) for op in ops), -noise_read(problem, ops)

        order = sorted(low_decisions(problem, base), key=worst_first)
        for target in fallback_precisions(problem):
            if (yield from fall_back_one_by_one(problem, base, order, target)):
                return
