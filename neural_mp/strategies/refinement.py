"""Local search by measured latency among plans that differ in one decision."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.search.cost_model import CostInputs, build_cost_model, without_int8
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Probe
from neural_mp.strategies.basic import group_by_type, set_op_precision
from neural_mp.strategies.decisions import decision_levels

#: Maximum number of plans measured per round, and of rounds.
_NEIGHBOURS, _MAX_ROUNDS = 6, 4
#: Number of plans if the time budget does not suffice for more.
_FEW_NEIGHBOURS = 2
#: A plan counts as faster below this ratio of latencies.
_FASTER = 0.99


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
