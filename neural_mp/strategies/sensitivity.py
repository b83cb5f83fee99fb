"""`mse`, `mse_v2` and `hawq_v2`: fallback in the order of measured sensitivity.

Sensitivity is output noise, ranked once or in every step, or Hessian-weighted quantization error.
"""

from __future__ import annotations

from collections.abc import Generator

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.space import ResolvedPlan
from neural_mp.strategies.base import Search, Strategy, TuningProblem
from neural_mp.strategies.basic import (
    Basic,
    choose_fallback_precisions,
    list_lowered_ops,
    set_op_precision,
)
from neural_mp.strategies.decisions import (
    Decision,
    fall_back_one_by_one,
    list_low_decisions,
    measure_output_noises,
    sum_input_noise,
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
        low = list_low_decisions(problem, base)
        decisions = [ops for ops in low if not helped or not helped.isdisjoint(ops)]
        # Types that only follow others into 16 bits may have helped, too.
        decisions += [(op,) for op in sorted(helped.difference(list_lowered_ops(problem, base)))]
        scores = _measure_decision_errors(problem, base, decisions)
        if not any(scores.values()):
            return (yield from super().by_op(problem, base, helped, target))
        order = sorted(decisions, key=lambda ops: -scores[ops])
        return (yield from fall_back_one_by_one(problem, base, order, target))


def _measure_decision_errors(
    problem: TuningProblem, base: PrecisionPlan, decisions: list[Decision]
) -> dict[Decision, float]:
    effective = problem.space.resolve(base).effective
    fp32 = dict.fromkeys(problem.space.tunable_ops, FP32)
    plans = (
        PrecisionPlan({**fp32, **{op: base.get(op) or OpConfig(effective[op]) for op in ops}})
        for ops in decisions
    )
    noises = measure_output_noises(problem, plans, [ops[0] for ops in decisions])
    if noises is None:
        noises = [sum_input_noise(problem, ops) for ops in decisions]
    return dict(zip(decisions, noises, strict=True))


#: Decision → the plan with that decision moved.
Candidates = dict[Decision, PrecisionPlan]


class MseV2(Strategy):
    """Intel Neural Compressor's `mse_v2`: fallback, then revert.

    1. All ops in their lowest precision.
    2. Fallback: every low decision is scored by the reduction of the output noise if it falls back;
       the one with the highest score falls back and the plan is tried. Repeat with new scores until
       the target is met.
    3. Revert: every raised decision is scored by the output noise if it is low again; the one with
       the least noise is lowered and the plan is tried. Repeat until a plan misses the target.

    Scores cost no evaluation, but one measurement on a few samples per decision and step. If output
    noise is unavailable, or its budget is spent, the noise of the tensors that an op reads ranks
    decisions instead.

    Fallback is to a requested 16-bit precision first, then to FP32.

    Source: `tuning_strategies.md`, "MSE_V2", and `strategy/mse_v2.py`.
    """

    name = "mse_v2"

    def search(self, problem: TuningProblem) -> Search:
        """Search as described in the class."""
        base = problem.space.fastest_plan()
        resolved = problem.space.resolve(base)
        if not resolved.has_low_precision:
            return
        (trial,) = yield [base]
        if trial.met:
            return
        tried = {resolved}
        for target in choose_fallback_precisions(problem):
            plan, raised = yield from _raise_decisions(problem, base, target, tried)
            if plan is not None:
                yield from _revert_decisions(problem, base, plan, raised, tried)
                return


def _raise_decisions(
    problem: TuningProblem, base: PrecisionPlan, target: Precision, tried: set[ResolvedPlan]
) -> Generator[list[PrecisionPlan], list[Trial], tuple[PrecisionPlan | None, list[Decision]]]:
    """Run step 2; return the plan that meets the target, or None, and the raised decisions."""
    space, plan = problem.space, base
    remaining = list_low_decisions(problem, base)
    raised: list[Decision] = []
    while remaining:
        moved = {ops: set_op_precision(space, plan, ops, target) for ops in remaining}
        ops = _find_quietest_decision(problem, moved, lowered=False)
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


def _revert_decisions(
    problem: TuningProblem,
    base: PrecisionPlan,
    plan: PrecisionPlan,
    raised: list[Decision],
    tried: set[ResolvedPlan],
) -> Search:
    """Run step 3, from the plan that met the target."""
    space, remaining = problem.space, list(raised)
    while True:
        moved = {ops: plan.replacing({op: base[op] for op in ops}) for ops in remaining}
        # Skip plans known to miss the target, e.g. the start of the last fallback step.
        moved = {ops: c for ops, c in moved.items() if space.resolve(c) not in tried}
        if not moved:
            return
        ops = _find_quietest_decision(problem, moved, lowered=True)
        remaining.remove(ops)
        plan = moved[ops]
        tried.add(space.resolve(plan))
        (trial,) = yield [plan]
        if not trial.met:
            return


def _find_quietest_decision(
    problem: TuningProblem, moved: Candidates, *, lowered: bool
) -> Decision:
    """Return the decision whose move leaves the least output noise.

    If output noise is unavailable or equal, the noise of the tensors that the decision reads
    decides: least first if the move lowers the decision, most first if it raises it.
    """
    sign = 1 if lowered else -1
    noises = measure_output_noises(problem, moved.values()) or [0.0] * len(moved)
    at_outputs = dict(zip(moved, noises, strict=True))
    return min(moved, key=lambda ops: (at_outputs[ops], sign * sum_input_noise(problem, ops)))


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
