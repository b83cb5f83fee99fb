"""Times of single ops and conversions, profiled within whole models and scaled to their latency."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.observations import OpTimings
from neural_mp.core.precision import Precision
from neural_mp.space import ResolvedPlan, TuningSpace

#: Op, or name of a conversion → seconds.
Profile = Mapping[str, float]


@dataclass(frozen=True)
class Timed:
    """A model under a plan, with the times of its ops.

    Attributes:
        plan: the resolved plan.
        model: the model.
        profile: seconds of ops and conversions, which add up to `whole`.
        whole: seconds of one run.
    """

    plan: ResolvedPlan
    model: AnyModel
    profile: Profile
    whole: float


def timed(
    models: Mapping[ResolvedPlan, AnyModel],
    profiled: Callable[[AnyModel], Profile],
    wholes: Callable[[Sequence[AnyModel]], Sequence[float]],
    passes: int,
) -> list[Timed]:
    """Profile models in interleaved passes; the fastest pass of each op counts.

    Profilers slow down some ops more than others, and omit the time between ops. So the times of
    each model's ops, from `profiled`, are scaled to its latency without a profiler, from `wholes`:
    no op gains more than the model.
    """
    fastest: dict[ResolvedPlan, dict[str, float]] = {plan: {} for plan in models}
    for _ in range(passes):
        for plan, model in models.items():
            kept = fastest[plan]
            for name, seconds in profiled(model).items():
                kept[name] = min(seconds, kept.get(name, seconds))
    return [
        Timed(plan, models[plan], scaled(fastest[plan], whole), whole)
        for plan, whole in zip(models, wholes(list(models.values())), strict=True)
    ]


def scaled(profile: Profile, whole: float) -> dict[str, float]:
    """Return seconds of ops scaled to the sum `whole`; unscaled if the sum or `whole` is zero."""
    total = sum(profile.values())
    scale = whole / total if total > 0 and whole > 0 else 1.0
    return {name: seconds * scale for name, seconds in profile.items()}


def times_of(
    space: TuningSpace,
    before: Timed,
    lowered: Sequence[Timed],
    per_element: float,
    in_place: bool = False,
) -> OpTimings:
    """Combine the timings of FP32 and of plans with ops in lower precisions.

    A conversion costs `per_element` seconds per element. If `in_place`, the additional time of
    FP32 ops next to lowered ones counts as conversion.
    """
    in_fp32 = seconds_by_op(space, before)
    ops = {op: {Precision.FP32: seconds} for op, seconds in in_fp32.items()}
    conversions, between = 0, 0.0
    for found in lowered:
        by_op = seconds_by_op(space, found)
        for op, seconds in by_op.items():
            precision = found.plan.effective[op]
            if op in ops and precision is not Precision.FP32:
                ops[op][precision] = seconds
        counts = found.model.conversions
        conversions += counts.casts + counts.quantize + counts.dequantize
        between += _conversion_seconds(space, before, found)
        between += _slowdown_of_fp32(before, found) if in_place else 0.0
    average = between / conversions if conversions else None
    return OpTimings(ops, average, per_element, before.whole)


def seconds_by_op(space: TuningSpace, found: Timed) -> dict[str, float]:
    """Return tunable op in its planned precision → seconds, including the ops fused into it.

    Ops without a recorded kernel are left out.
    """
    plan = found.plan
    seconds = {
        op: sum(found.profile.get(name, 0.0) for name in names)
        for op, names in kernels(space).items()
        if plan.plan[op].precision is plan.effective[op]
    }
    return {op: taken for op, taken in seconds.items() if taken > 0}


def kernels(space: TuningSpace) -> dict[str, list[str]]:
    """Return tunable op → itself and the ops fused into its kernel."""
    found = {op: [op] for op in space.tunable_ops}
    for op in space.graph:
        if op.fusion_group in found:
            found[op.fusion_group].append(op.name)
    return found


def _conversion_seconds(space: TuningSpace, before: Timed, found: Timed) -> float:
    known = {op.name for op in space.graph}
    added = found.profile.keys() - before.profile.keys() - known
    return sum(found.profile[name] for name in added)


def _slowdown_of_fp32(before: Timed, found: Timed) -> float:
    """Return the seconds that FP32 ops take longer than in the FP32 model.

    A runtime may convert or rearrange values within such an op.
    """
    more = (
        found.profile.get(name, 0.0) - before.profile.get(name, 0.0)
        for name, precision in found.plan.effective.items()
        if precision is Precision.FP32
    )
    return max(0.0, sum(more))


def updated(times: OpTimings, within: OpTimings) -> OpTimings:
    """Return times updated with those measured within a plan."""
    ops = {op: dict(by) for op, by in times.ops.items()}
    for op, by in within.ops.items():
        ops.setdefault(op, {}).update(by)
    conversion = times.conversion if within.conversion is None else within.conversion
    return OpTimings(ops, conversion, within.per_element, within.whole)
