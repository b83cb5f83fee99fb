"""`hawq_v2`: fallback in the order of Hessian-weighted quantization error."""

from __future__ import annotations

from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import choose_fallback_precisions
from neural_mp.strategies.decisions import fall_back_one_by_one, list_low_decisions, sum_input_noise


class HawqV2(Strategy):
    """Intel Neural Compressor's `hawq_v2`.

    1. All ops in their lowest precision.
    2. Every op with a weight is scored once: trace of the Hessian of the loss by its weight, times
       the squared error of rounding the weight to INT8. Scores of tied ops are summed. Requires
       gradients, which some frameworks lack.
    3. Decisions fall back cumulatively, highest score first, until the target is met. Ops without
       weights come last, by the noise of the tensors that they read.

    Fallback is to a requested 16-bit precision first, then to FP32.

    Sources: Dong et al., "HAWQ-V2: Hessian Aware trace-Weighted Quantization of Neural Networks",
    NeurIPS 2020, for the score; `tuning_strategies.md`, "HAWQ_V2", for its use. The paper uses the
    score to choose bit widths; Intel's strategy scores by the trace alone.
    """

    name = "hawq_v2"
    needs_gradients = True

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class.

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
        order = sorted(  # the worst first
            list_low_decisions(problem, base),
            key=lambda ops: (
                -sum(scores.get(op, 0.0) for op in ops),
                -sum_input_noise(problem, ops),
            ),
        )
        for target in choose_fallback_precisions(problem):
            if (yield from fall_back_one_by_one(problem, base, order, target)):
                return
