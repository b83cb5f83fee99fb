"""Plans near another plan: neighbours by latency, fallbacks after a miss, gaps of the front.

Plans of a local search differ in one decision. A minimum cut finds the corners of the convex hull
of the Pareto front only: tensors of similar noise per saved time move together from one corner to
the next, which may be most of the model.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.core.trial import Trial
from neural_mp.search.cost_model import (
    CostInputs,
    CostModel,
    build_cost_model,
    without_int8,
    without_tensors,
)
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Probe, TuningProblem
from neural_mp.strategies.basic import group_by_type, set_op_precision
from neural_mp.strategies.decisions import decision_levels, list_head_branches

#: Maximum number of plans measured per round, and of rounds.
_NEIGHBOURS, _MAX_ROUNDS = 6, 4
#: Number of plans if the time budget does not suffice for more.
_FEW_NEIGHBOURS = 2
#: A plan counts as faster below this ratio of latencies.
_FASTER = 0.99
#: A tensor with a higher NSR is among the first to leave INT8.
_NSR_FALLBACK_THRESHOLD = 0.05
#: Losses up to this multiple of the tolerance are taken as proportional to the noise.
_MAX_LOSS_RATIO = 2.0
#: Predicted noise that a plan may keep, as a fraction of what the tolerance allows.
_NOISE_MARGIN = 0.95


def list_neighbouring_plans(
    space: TuningSpace, plan: PrecisionPlan, inputs: CostInputs, may_lower: bool
) -> list[PrecisionPlan]:
    """Return the plans that differ from a plan in one decision, fastest by single ops first.

    Unless `may_lower`, decisions only fall back.
    """
    model, precisions, plans = (
        build_cost_model(space, inputs),
        plan.precisions,
        list[PrecisionPlan](),
    )
    for ops in space.decision_groups:
        bits = max(precisions.get(op, Precision.FP32).bits for op in ops)
        for level in decision_levels(space, ops):
            if level.bits > bits or (may_lower and level.bits < bits):
                plans.append(set_op_precision(space, plan, ops, level))
    return sorted(dict.fromkeys(plans), key=lambda candidate: model.plan_cost(candidate)[0])


def without_a_type(
    space: TuningSpace, plan: PrecisionPlan, gains: Mapping[str, float]
) -> list[PrecisionPlan]:
    """Return plans without INT8 in the ops of one type, the type that gains least first.

    `gains` are the seconds that ops save.
    """
    in_int8 = (op for op, config in plan.items() if config.precision is Precision.INT8)
    by_type = group_by_type(space, in_int8)
    order = sorted(by_type.values(), key=lambda ops: sum(gains.get(op, 0.0) for op in ops))
    return [without_int8(space, plan, ops) for ops in order]


def find_fastest_nearby(
    probe: Probe,
    plan: PrecisionPlan,
    candidates: Callable[[PrecisionPlan], Iterable[PrecisionPlan]],
) -> PrecisionPlan | None:
    """Move to the fastest measured candidate repeatedly, until none is faster.

    `candidates` returns the plans to measure against a plan, most promising first; the first few
    are read.

    Returns:
        A faster plan; the plan itself if there is none; None if measurement is impossible.
    """
    for _ in range(_MAX_ROUNDS):
        faster = _search_faster(probe, plan, list(islice(candidates(plan), _NEIGHBOURS)))
        if faster is None or faster == plan:
            return faster
        plan = faster
    return plan


def _search_faster(
    probe: Probe, plan: PrecisionPlan, candidates: Sequence[PrecisionPlan]
) -> PrecisionPlan | None:
    if not candidates:
        return plan
    for most in (_NEIGHBOURS, _FEW_NEIGHBOURS):
        seconds = probe.latencies([plan, *candidates[:most]])
        if seconds is not None:
            baseline, *latencies = seconds
            least = min(latencies)
            return candidates[latencies.index(least)] if least < baseline * _FASTER else plan
    return None


def lower_only(plan: PrecisionPlan, ops: Iterable[str]) -> PrecisionPlan:
    """Return a plan with all but these ops in FP32."""
    lowered = set(ops)
    return plan.replacing({op: FP32 for op in plan if op not in lowered})


def list_low_ops(plan: PrecisionPlan) -> set[str]:
    """Return the ops that a plan has in a lower precision."""
    return {op for op, config in plan.items() if config.precision is not Precision.FP32}


def list_first_fallbacks(
    problem: TuningProblem,
    model: CostModel,
    missed: Trial,
    tensors: Sequence[QuantizedTensor],
    noise: Mapping[str, float],
) -> list[PrecisionPlan]:
    """Return the plans to try first after a miss, the one with more INT8 first.

    After a narrow miss, the loss is taken as proportional to the noise at the outputs, and as few
    tensors leave INT8 as that requires. In another plan, all tensors with an NSR above 5 % do. If
    the head has branches, a plan without INT8 in the noisiest of these is between the two.

    Args:
        problem: has the space and the tolerated loss.
        model: predicts time and noise of plans.
        missed: the trial.
        tensors: all tensors, first to fall back first.
        noise: tensor → NSR.
    """
    noisy = [t for t in tensors if noise.get(t.name, 0.0) > _NSR_FALLBACK_THRESHOLD]
    counts = {len(noisy)} | _predict_fewest_fallbacks(problem, model, missed, tensors)
    fallbacks = [tensors[:count] for count in sorted(counts)]
    if branch := _find_noisiest_branch(problem.space, tensors, noise):
        fallbacks = sorted([*fallbacks, branch], key=len)
    return [without_tensors(problem.space, missed.plan, fallback) for fallback in fallbacks]


def _find_noisiest_branch(
    space: TuningSpace, tensors: Sequence[QuantizedTensor], noise: Mapping[str, float]
) -> list[QuantizedTensor]:
    """Return the quantized tensors of the noisiest branch of the head; none without branches."""
    branches = [
        [tensor for tensor in tensors if branch.issuperset(tensor.quantizing_ops)]
        for branch in list_head_branches(space)
    ]
    return max(
        branches, key=lambda own: sum(noise.get(tensor.name, 0.0) for tensor in own), default=[]
    )


def list_further_fallbacks(
    problem: TuningProblem,
    model: CostModel,
    trials: tuple[Trial, Trial],
    tensors: Sequence[QuantizedTensor],
) -> list[PrecisionPlan]:
    """Return the plan to try after a guess that reduced the loss and missed narrowly, if any.

    `trials` are the first one and that of the guess; the others as in `list_first_fallbacks`.
    """
    first, missed = trials
    if not has_less_loss(missed, first):
        return []
    counts = _predict_fewest_fallbacks(problem, model, missed, tensors)
    return [without_tensors(problem.space, missed.plan, tensors[:count]) for count in counts]


def has_less_loss(trial: Trial, reference: Trial) -> bool:
    """Whether a trial is known to lose less accuracy than another one."""
    return trial.loss is not None and reference.loss is not None and trial.loss < reference.loss


def tolerated_noise_ratio(problem: TuningProblem, missed: Trial) -> float:
    """Return the noise that is expected to meet the target over that of a plan that missed it.

    0 after a wide miss, of which nothing is expected.
    """
    tolerance, loss = problem.tolerance, missed.loss
    # A plan may miss with a tolerated loss: by the bound of a loss on other texts.
    if not tolerance or loss is None or not tolerance < loss <= _MAX_LOSS_RATIO * tolerance:
        return 0.0
    return tolerance / loss * _NOISE_MARGIN


def _predict_fewest_fallbacks(
    problem: TuningProblem, model: CostModel, missed: Trial, tensors: Sequence[QuantizedTensor]
) -> set[int]:
    """Return the least number of tensors whose fallback is predicted to suffice, if known."""
    ratio = tolerated_noise_ratio(problem, missed)
    if not ratio:
        return set()
    plan, most = missed.plan, model.plan_cost(missed.plan)[1] * ratio
    count = bisect_left(
        range(len(tensors)),
        True,
        key=lambda n: model.plan_cost(without_tensors(problem.space, plan, tensors[:n]))[1] <= most,
    )
    return {count} if count < len(tensors) else set()


def plan_halfway(
    space: TuningSpace,
    model: CostModel,
    trials: Sequence[Trial],
    tensors: Sequence[QuantizedTensor],
) -> PrecisionPlan | None:
    """Return a plan between the fastest trial that met the target and the closest that missed it.

    Of the `tensors` that separate the two, in this order, the first half falls back. None without
    two such trials and two such tensors, or if the plan is not expected to be faster than the trial
    that met the target.
    """
    accurate = [trial.plan for trial in trials if trial.meets_accuracy]
    if not accurate:
        return None
    met = min(accurate, key=lambda plan: model.plan_cost(plan)[0])
    wider = [
        t.plan for t in trials if not t.meets_accuracy and list_low_ops(met) < list_low_ops(t.plan)
    ]
    if not wider:
        return None
    missed = min(wider, key=lambda plan: len(list_low_ops(plan)))
    between = [t for t in tensors if _in_int8(missed, t) and not _in_int8(met, t)]
    plan = without_tensors(space, missed, between[: len(between) // 2])
    faster = model.plan_cost(plan)[0] < model.plan_cost(met)[0]
    return plan if faster and len(between) > 1 else None


def _in_int8(plan: PrecisionPlan, tensor: QuantizedTensor) -> bool:
    return any(plan[op].precision is Precision.INT8 for op in tensor.quantizing_ops)
