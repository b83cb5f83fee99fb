"""Times of single ops and conversions, profiled within whole models and scaled to their latency."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.graph import OpGraph
from neural_mp.core.op_timings import (
    WITHIN_ANOTHER_SECONDS,
    Duration,
    OpRuns,
    OpTimings,
    Workload,
    describe_timed_form,
)
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.profiling import time_interleaved_medians
from neural_mp.runs.report import Conversion
from neural_mp.space import ResolvedPlan, TuningSpace

_WITHIN_ANOTHER = Duration(*[WITHIN_ANOTHER_SECONDS] * 3)


@dataclass(frozen=True)
class Timed:
    """A model under a plan, with the times of its ops.

    Attributes:
        plan: the resolved plan.
        runs: op or conversion → seconds of each run, scaled: their `op_profile` adds up to `whole`.
        whole: seconds of one run.
    """

    plan: ResolvedPlan
    model: AnyModel
    runs: OpRuns
    whole: float

    @cached_property
    def op_profile(self) -> dict[str, float]:
        """Op or conversion → seconds."""
        return {name: Duration.from_runs(runs).seconds for name, runs in self.runs.items()}

    def total_duration(self, names: Sequence[str]) -> Duration:
        """Return the time of several ops together."""
        runs = [self.runs[name] for name in names if self.runs.get(name)]
        together = (sum(run) for run in zip(*runs, strict=False))
        return Duration.from_runs(together) if runs else Duration(0.0, 0.0, 0.0)


def plan_in_precision(
    precision: Precision, space: TuningSpace, ops: Collection[str] | None = None
) -> ResolvedPlan:
    """Return the plan with all ops, or those of `ops`, in a precision; FP32 if ineligible."""
    among = space.tunable_ops if ops is None else ops
    chosen = {
        op: (space.choice(op, precision) if op in among else None) or FP32
        for op in space.tunable_ops
    }
    return space.resolve(PrecisionPlan(chosen))


def time_ops(
    models: Mapping[ResolvedPlan, AnyModel],
    profiled: Callable[[AnyModel], OpRuns],
    wholes: Callable[[Sequence[AnyModel]], Sequence[float]],
    passes: int,
    affords_another: Callable[[], bool] = lambda: True,
) -> list[Timed]:
    """Profile models in interleaved passes; the fastest pass of each op counts.

    A pass after the first is made only if the time suffices, by `affords_another`.

    Profilers slow down some ops more than others, and omit the time between ops. So the times of
    each model's ops, from `profiled`, are scaled to its latency without a profiler, from `wholes`:
    no op gains more than the model.
    """
    fastest: dict[ResolvedPlan, dict[str, tuple[float, ...]]] = {plan: {} for plan in models}
    for number in range(passes):
        if number and not affords_another():
            break
        for plan, model in models.items():
            best = fastest[plan]
            for name, runs in profiled(model).items():
                best[name] = min(runs, best.get(name, runs), key=Duration.from_runs)
    return [
        Timed(plan, models[plan], scale_runs(fastest[plan], whole), whole)
        for plan, whole in zip(models, wholes(list(models.values())), strict=True)
    ]


def scale_runs(runs: OpRuns, whole: float) -> dict[str, tuple[float, ...]]:
    """Return runs of ops scaled to the sum `whole`; unscaled if the sum or `whole` is zero."""
    total = sum(Duration.from_runs(times).seconds for times in runs.values())
    scale = whole / total if total > 0 and whole > 0 else 1.0
    return {name: tuple(seconds * scale for seconds in times) for name, times in runs.items()}


def combine_op_timings(
    space: TuningSpace,
    baseline: Timed,
    lowered: Sequence[Timed],
    per_element: float,
    elements: Mapping[str, float],
    in_place: bool = False,
) -> OpTimings:
    """Combine the timings of FP32 and of plans with ops in lower precisions.

    The measured conversions take constant time, and `per_element` seconds per element, as far as
    these do not exceed their measured time; `elements` holds their number by tensor, as far as
    known. If the plans were tried `in_place`, the additional time of FP32 ops next to lowered ones
    counts as conversion.
    """
    fp32, names = op_durations(space, baseline), {op.name for op in space.graph}
    ops = {op: {Precision.FP32: duration} for op, duration in fp32.items()}
    conversions, between, converted = 0, 0.0, list[float]()
    for low in lowered:
        for op, duration in op_durations(space, low).items():
            precision = low.plan.effective[op]
            if precision is not Precision.FP32 and (op in ops or op in baseline.runs):
                ops.setdefault(op, {Precision.FP32: _WITHIN_ANOTHER})[precision] = duration
        counts = low.model.conversions
        conversions += counts.casts + counts.quantize + counts.dequantize
        added = low.op_profile.keys() - baseline.op_profile.keys() - names
        between += sum(low.op_profile[name] for name in added)
        between += _slowdown_of_fp32(baseline, low) if in_place else 0.0
        sources = [
            change.source for change in list_plan_conversions(space.graph, low.plan.flow, {})
        ]
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


def op_durations(space: TuningSpace, timing: Timed) -> dict[str, Duration]:
    """Return tunable op in its planned precision → time, including the ops fused into it.

    Ops without a recorded kernel are left out.
    """
    plan = timing.plan
    times = {
        op: timing.total_duration(names)
        for op, names in ops_by_kernel(space).items()
        if plan.plan[op].precision is plan.effective[op]
    }
    return {op: duration for op, duration in times.items() if duration.seconds > 0}


def ops_by_kernel(space: TuningSpace) -> dict[str, list[str]]:
    """Return tunable op → itself and the ops fused into its kernel."""
    groups = {op: [op] for op in space.tunable_ops}
    for op in space.graph:
        if op.fusion_group in groups:
            groups[op.fusion_group].append(op.name)
    return groups


def _slowdown_of_fp32(baseline: Timed, candidate: Timed) -> float:
    """Return the seconds that FP32 ops take longer than in the FP32 model.

    A runtime may convert or rearrange values within such an op.
    """
    more = (
        candidate.op_profile.get(name, 0.0) - baseline.op_profile.get(name, 0.0)
        for name, precision in candidate.plan.effective.items()
        if precision is Precision.FP32
    )
    return max(0.0, sum(more))


def update_times(times: OpTimings, within: OpTimings) -> OpTimings:
    """Return times updated with those measured within a plan."""
    ops = {op: {**by, **within.ops.get(op, {})} for op, by in times.ops.items()}
    spread = {op: {**times.spread.get(op, {}), **within.spread.get(op, {})} for op in ops}
    source = times if within.conversion is None else within
    return OpTimings(
        ops, source.conversion, source.per_element, within.whole, spread, times.conversions
    )


def list_plan_conversions(
    graph: OpGraph, flow: QuantizationFlow, seconds: Mapping[str, float]
) -> tuple[Conversion, ...]:
    """Return the conversions of tensors under a plan.

    The key of a conversion in `seconds` is the name of its tensor, a slash and a word.
    """
    conversions = []
    for name in (*graph.inputs, *(op.name for op in graph)):
        for kind, readers in _group_conversion_consumers(graph, flow, name).items():
            durations = [
                value
                for key, value in seconds.items()
                if key.startswith(f"{name}/") and key not in graph
            ]
            conversions.append(
                Conversion(name, tuple(readers), kind, sum(durations) if durations else None)
            )
    return tuple(conversions)


def _group_conversion_consumers(
    graph: OpGraph, flow: QuantizationFlow, name: str
) -> dict[str, list[str]]:
    """Return kind of conversion → the consumers of a tensor converted so."""
    consumers: dict[str, list[str]] = {}
    written = flow.effective.get(name, Precision.FP32)
    for reader in graph.consumer_names(name):
        quantized = name in flow.int8_reads.get(reader, ())
        if quantized != (name in flow.int8_outputs):
            consumers.setdefault("quantize" if quantized else "dequantize", []).append(reader)
        elif not quantized:
            runs = flow.effective[reader]
            low = {p for p in (written, runs) if p.is_16_bit}
            if low and written is not runs and Precision.INT8 not in (written, runs):
                consumers.setdefault("cast", []).append(reader)
    return consumers


#: Minimum time that ops lose in INT8 together, as a fraction of FP32's, for plans that consist of
#: conversions to matter.
_MIN_LOSS_RATIO = 0.05
#: Exceeds the caches of a core.
_MANY_VALUES = 1 << 21


def loses_in_int8(times: OpTimings) -> bool:
    """Whether INT8 slows down ops by much, so that the fastest plan converts between ops."""
    pairs = [by for by in times.ops.values() if {Precision.FP32, Precision.INT8} <= by.keys()]
    lost = sum(max(0.0, by[Precision.INT8] - by[Precision.FP32]) for by in pairs)
    return times.whole is not None and lost > _MIN_LOSS_RATIO * times.whole


def weights_in_int8(space: TuningSpace) -> ResolvedPlan:
    """Return the plan with INT8 in ops with weights only: most tensors between are converted."""
    return plan_in_precision(Precision.INT8, space, {op.name for op in space.graph if op.weights})


def with_conversions(
    space: TuningSpace, times: OpTimings, mixed: Timed, elements: Mapping[str, float]
) -> OpTimings:
    """Return times with those of the conversions in a plan that has many.

    A model in one precision has hardly any, and of other sizes. The additional time of an op in the
    plan, over a model in the op's precision, is that of converting what the op reads: runtimes
    convert in the op's kernel, or next to it. Other tensors take as long per element, whose number
    `elements` holds by tensor, as far as known.
    """
    effective = mixed.plan.effective
    more = {
        op: max(0.0, mixed.total_duration(names).seconds - baseline)
        for op, names in ops_by_kernel(space).items()
        if (baseline := times.ops.get(op, {}).get(effective[op])) is not None
    }
    seconds: dict[str, float] = defaultdict(float)
    for conversion in list_plan_conversions(space.graph, mixed.plan.flow, mixed.op_profile):
        seconds[conversion.source] += (conversion.seconds or 0.0) + sum(
            more.get(r, 0.0) for r in conversion.readers
        )
    count = sum(elements.get(tensor, 0.0) for tensor in seconds)
    if not count:
        return times
    per_element = sum(seconds.values()) / count
    return replace(times, conversion=0.0, per_element=per_element, conversions=dict(seconds))


def seconds_per_element() -> float:
    """Return the seconds per element to read float32 and write INT8 on this machine."""
    values = np.zeros(_MANY_VALUES, np.float32)
    seconds = time_interleaved_medians([lambda: values.astype(np.uint8)], iterations=7)[0]
    return seconds / _MANY_VALUES


#: Minimum number of rounds, and seconds after which no round starts, for one shape of layer.
_ROUNDS, _TIME_LIMIT = 7, 2.0
#: Form → rows per call, as text → seconds.
_Times = dict[str, dict[str, float]]


def time_layer_forms(model: AnyTunableModel, workload: Workload) -> dict[str, _Times]:
    """Return op → form → rows per call, as text → seconds.

    One layer of each shape is timed, in interleaved rounds of all forms. Empty if the framework
    does not run layers alone.
    """
    tunable = {*model.space.tunable_ops}
    alike: defaultdict[tuple[Hashable, frozenset[str]], list[str]] = defaultdict(list)
    for op, shape in model.layer_shapes.items():
        if op in tunable:
            alike[shape, frozenset(_config_by_form(model, op))].append(op)
    times: dict[str, _Times] = {}
    for ops in alike.values():
        times |= dict.fromkeys(ops, _time_op_forms(model, ops[0], workload))
    return times


def _config_by_form(model: AnyTunableModel, op: str) -> Mapping[str, OpConfig]:
    """Return the forms of an op with a configuration of each, the least corrected one."""
    choices = sorted(
        model.space.choices(op),
        key=lambda c: len(c.corrections) + (0 if c.weight is None else len(c.weight.corrections)),
        reverse=True,
    )
    return {form: config for config in choices if (form := describe_timed_form(config)) is not None}


def _time_op_forms(model: AnyTunableModel, op: str, workload: Workload) -> _Times:
    models: dict[str, AnyModel] = {}
    for form, config in _config_by_form(model, op).items():
        plan = model.space.fp32_plan().replacing({op: config})
        models[form] = model.convert_by_plan(model.space.resolve(plan))
    times: _Times = {form: {} for form in models}
    for rows in workload.row_counts:
        runs = [converted.make_layer_run(op, rows) for converted in models.values()]
        seconds = time_interleaved_medians(runs, iterations=_ROUNDS, time_limit=_TIME_LIMIT)
        for form, duration in zip(models, seconds, strict=True):
            times[form][str(rows)] = duration
    return times
