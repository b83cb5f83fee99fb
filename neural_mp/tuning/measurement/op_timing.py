"""Times of single ops and conversions, profiled within whole models and scaled to their latency."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.op_timings import WITHIN_ANOTHER_SECONDS, Duration, OpRuns, OpTimings
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import ResolvedPlan, TuningSpace
from neural_mp.tuning.measurement.conversions import converted_tensors

_WITHIN_ANOTHER = Duration(*[WITHIN_ANOTHER_SECONDS] * 3)


@dataclass(frozen=True)
class Timed:
    """A model under a plan, with the times of its ops.

    Attributes:
        plan: the resolved plan.
        model: the model.
        runs: op or conversion → seconds of each run, scaled: their `profile` adds up to `whole`.
        whole: seconds of one run.
    """

    plan: ResolvedPlan
    model: AnyModel
    runs: OpRuns
    whole: float

    @cached_property
    def profile(self) -> dict[str, float]:
        """Op or conversion → seconds."""
        return {name: Duration.of(runs).seconds for name, runs in self.runs.items()}

    def duration(self, names: Sequence[str]) -> Duration:
        """Return the time of several ops together."""
        runs = [self.runs[name] for name in names if self.runs.get(name)]
        together = (sum(run) for run in zip(*runs, strict=False))
        return Duration.of(together) if runs else Duration(0.0, 0.0, 0.0)


def all_in(
    precision: Precision, space: TuningSpace, ops: Collection[str] | None = None
) -> ResolvedPlan:
    """Return the plan with all ops, or those of `ops`, in a precision; FP32 if ineligible."""
    among = space.tunable_ops if ops is None else ops
    chosen = {
        op: (space.choice(op, precision) if op in among else None) or FP32
        for op in space.tunable_ops
    }
    return space.resolve(PrecisionPlan(chosen))


def timed(
    models: Mapping[ResolvedPlan, AnyModel],
    profiled: Callable[[AnyModel], OpRuns],
    wholes: Callable[[Sequence[AnyModel]], Sequence[float]],
    passes: int,
) -> list[Timed]:
    """Profile models in interleaved passes; the fastest pass of each op counts.

    Profilers slow down some ops more than others, and omit the time between ops. So the times of
    each model's ops, from `profiled`, are scaled to its latency without a profiler, from `wholes`:
    no op gains more than the model.
    """
    fastest: dict[ResolvedPlan, dict[str, tuple[float, ...]]] = {plan: {} for plan in models}
    for _ in range(passes):
        for plan, model in models.items():
            best = fastest[plan]
            for name, runs in profiled(model).items():
                best[name] = min(runs, best.get(name, runs), key=Duration.of)
    return [
        Timed(plan, models[plan], scaled(fastest[plan], whole), whole)
        for plan, whole in zip(models, wholes(list(models.values())), strict=True)
    ]


def scaled(runs: OpRuns, whole: float) -> dict[str, tuple[float, ...]]:
    """Return runs of ops scaled to the sum `whole`; unscaled if the sum or `whole` is zero."""
    total = sum(Duration.of(times).seconds for times in runs.values())
    scale = whole / total if total > 0 and whole > 0 else 1.0
    return {name: tuple(seconds * scale for seconds in times) for name, times in runs.items()}


def times_of(
    space: TuningSpace,
    baseline: Timed,
    lowered: Sequence[Timed],
    per_element: float,
    elements: Mapping[str, float],
    in_place: bool = False,
) -> OpTimings:
    """Combine the timings of FP32 and of plans with ops in lower precisions.

    The measured conversions take constant time, and `per_element` seconds per element, as far as
    these do not exceed their measured time. If `in_place`, the additional time of FP32 ops next to
    lowered ones counts as conversion.

    Args:
        space: the space of the plans.
        baseline: FP32.
        lowered: the plans.
        per_element: seconds to convert one element in a loop over memory.
        elements: tensor → number of elements, as far as known.
        in_place: whether the plans were tried.
    """
    fp32 = durations(space, baseline)
    ops = {op: {Precision.FP32: duration} for op, duration in fp32.items()}
    conversions, between, converted = 0, 0.0, list[float]()
    for low in lowered:
        for op, duration in durations(space, low).items():
            precision = low.plan.effective[op]
            if precision is not Precision.FP32 and (op in ops or op in baseline.runs):
                ops.setdefault(op, {Precision.FP32: _WITHIN_ANOTHER})[precision] = duration
        counts = low.model.conversions
        conversions += counts.casts + counts.quantize + counts.dequantize
        between += _conversion_seconds(space, baseline, low)
        between += _slowdown_of_fp32(baseline, low) if in_place else 0.0
        sources = converted_tensors(space.graph, low.plan.flow)
        converted += [elements[name] for name in sources if name in elements]
    average = between / conversions if conversions else None
    if average is not None and any(converted):
        mean = sum(converted) / len(converted)
        per_element = min(per_element, average / mean)
        # Rounding leaves less than 0 where the elements take all the time.
        average = max(0.0, average - per_element * mean)
    seconds = {op: {p: time.seconds for p, time in by.items()} for op, by in ops.items()}
    spread = {op: {p: (d.low, d.high) for p, d in by.items()} for op, by in ops.items()}
    return OpTimings(seconds, average, per_element, baseline.whole, spread)


def durations(space: TuningSpace, timing: Timed) -> dict[str, Duration]:
    """Return tunable op in its planned precision → time, including the ops fused into it.

    Ops without a recorded kernel are left out.
    """
    plan = timing.plan
    times = {
        op: timing.duration(names)
        for op, names in kernels(space).items()
        if plan.plan[op].precision is plan.effective[op]
    }
    return {op: duration for op, duration in times.items() if duration.seconds > 0}


def kernels(space: TuningSpace) -> dict[str, list[str]]:
    """Return tunable op → itself and the ops fused into its kernel."""
    groups = {op: [op] for op in space.tunable_ops}
    for op in space.graph:
        if op.fusion_group in groups:
            groups[op.fusion_group].append(op.name)
    return groups


def _conversion_seconds(space: TuningSpace, baseline: Timed, candidate: Timed) -> float:
    names = {op.name for op in space.graph}
    added = candidate.profile.keys() - baseline.profile.keys() - names
    return sum(candidate.profile[name] for name in added)


def _slowdown_of_fp32(baseline: Timed, candidate: Timed) -> float:
    """Return the seconds that FP32 ops take longer than in the FP32 model.

    A runtime may convert or rearrange values within such an op.
    """
    more = (
        candidate.profile.get(name, 0.0) - baseline.profile.get(name, 0.0)
        for name, precision in candidate.plan.effective.items()
        if precision is Precision.FP32
    )
    return max(0.0, sum(more))


def updated(times: OpTimings, within: OpTimings) -> OpTimings:
    """Return times updated with those measured within a plan."""
    ops = {op: {**by, **within.ops.get(op, {})} for op, by in times.ops.items()}
    spread = {op: {**times.spread.get(op, {}), **within.spread.get(op, {})} for op in ops}
    source = times if within.conversion is None else within
    return OpTimings(
        ops, source.conversion, source.per_element, within.whole, spread, times.conversions
    )
