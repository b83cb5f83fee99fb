"""The result of a run, its report, and the records of its start and end."""

from __future__ import annotations

import logging
import math
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware
from neural_mp.core.observations import Observations, WidthFigures
from neural_mp.core.op_timings import FULL_PROFILE, SHOWN_PROFILE, Duration, OpTimings, ProfileRuns
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import CPU_PRECISIONS, OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.profiling import Ratio
from neural_mp.runs.report import (
    AcceleratorFigures,
    Machine,
    Report,
    RunEnd,
    RunRecord,
    RunStart,
    count_ops,
)
from neural_mp.search.corrections import apply_correction_nsr, choose_best_corrections
from neural_mp.space import Capability, ResolvedPlan, TuningSpace, count_ineligible_reasons
from neural_mp.targets import words_of
from neural_mp.targets.profile import TargetCosts
from neural_mp.tuning.final_selection import Selection
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.op_timing import list_plan_conversions
from neural_mp.util.noise import nsr_to_decibels
from neural_mp.util.system.environment import read_package_versions

logger = logging.getLogger(__name__)

#: Packages that every run depends on, besides its framework.
_PACKAGES = ("neural-mp", "numpy", "optuna")
#: Seconds for the op times of the report.
_OP_TIMES_SECONDS = 1.0
#: Op or conversion → seconds.
Profile = Mapping[str, float]
NO_PROFILE: Profile = MappingProxyType({})


def utc_now() -> str:
    """Return date and time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def record_run_setup(job: TuningJob) -> RunStart:
    """Return the record of the start of a run."""
    space, packages = job.space, (*_PACKAGES, *job.model.adaptor.packages)
    return RunStart(
        started=utc_now(),
        model=job.description.model,
        framework=job.model.adaptor.framework,
        **_collect_space_fields(space),
        fan_in=_fan_in_by_op(job.model),
        settings=job.description.settings,
        batch_size=job.measurement.batch_size,
        machine=describe_run_machine(job.description.hardware),
        versions={"Python": platform.python_version(), **read_package_versions(packages)},
        runtimes=job.runtimes,
    )


def setup_in_space(setup: RunStart, space: TuningSpace) -> RunStart:
    """Return the record of a start with the space that calibration left."""
    return replace(setup, **_collect_space_fields(space))


def _collect_space_fields(space: TuningSpace) -> dict[str, Any]:
    """Return the fields of a `RunStart` for a space, without details of configurations."""
    capabilities = {
        op: Capability(
            tuple(map(OpConfig, capability.precisions)), capability.reasons, capability.emulated
        )
        for op, capability in space.capabilities.items()
    }
    return {
        "graph": space.graph,
        "capabilities": capabilities,
        "tunable_ops": space.tunable_ops,
        "tensors": space.tensors,
    }


def _fan_in_by_op(model: AnyTunableModel) -> dict[str, int]:
    """Return op with a weight → number of products per output element."""
    offered = model.adaptor.corrections
    shapes = {
        op: (np.shape(layer.weight()), layer.outputs)
        for op, layer in (offered.layer_params(model.held) if offered else {}).items()
        if layer.inputs is not None
    }
    return {
        op: math.prod(shape) // shape[outputs] if shape[outputs] else 0
        for op, (shape, outputs) in shapes.items()
    }


def describe_run_machine(hardware: Hardware) -> Machine:
    """Return the description of a machine."""
    native = dict.fromkeys(flag for flags in NATIVE_FLAGS.values() for flag in flags)
    return Machine(
        hardware.name,
        hardware.cores,
        tuple(flag for flag in native if flag in hardware.flags),
        {
            p.value: (s.execution_mode, s.reason)
            for p in CPU_PRECISIONS
            for s in [hardware.support(p)]
        },
        f"{platform.system()} {platform.release()}, {platform.machine()}",
    )


def record_run_ending(
    job: TuningJob,
    selection: Selection,
    met: bool | None,
    report: Report,
    times: OpTimings | None = None,
    trials: Sequence[Trial] = (),
    fp32_profile: Profile = NO_PROFILE,
) -> RunEnd:
    """Return the record of the end of a run; `times` and `fp32_profile` are those of the search.

    Ops are timed in few runs, or on one sample, if more takes longer than a second; those of FP32
    are not timed again on the same samples.
    """
    seconds = report.latency or 0.0
    if selection.model is not job.model:
        seconds += report.baseline_latency or 0.0
    runs, samples = _choose_sampling(seconds, _OP_TIMES_SECONDS, job.measurement.batch_size)
    if not fp32_profile or samples is not None:
        fp32_profile = _profile_ops(job, job.model, runs, samples)
    profile = fp32_profile
    if selection.model is not job.model:
        profile = _profile_ops(job, selection.model, runs, samples)
    return RunEnd(
        utc_now(),
        met,
        selection.plan.plan,
        report,
        None if selection.trial is None else selection.trial.number,
        selection.remeasured,
        _predict_latencies(job, trials, times or OpTimings()),
        fp32_profile,
        profile,
        list_plan_conversions(job.space.graph, selection.plan.flow, profile),
        samples,
    )


def _choose_sampling(
    seconds: float, allowed: float, batch_size: int
) -> tuple[ProfileRuns, int | None]:
    """Return how often to run ops, and on how many samples (None: the timed batch)."""
    if seconds * sum(FULL_PROFILE) <= allowed:
        return FULL_PROFILE, None
    few = seconds * sum(SHOWN_PROFILE) <= allowed or batch_size <= 1
    return SHOWN_PROFILE, None if few else 1


def _profile_ops(
    job: TuningJob, model: AnyModel, runs: ProfileRuns, samples: int | None
) -> Profile:
    """Return op → seconds; empty if the framework does not support profiling."""
    try:
        inputs = job.measurement.inputs if samples is None else job.model.example_inputs(samples)
        with model.adaptor.threads(job.measurement.threads):
            durations = model.profile_ops(inputs, runs)
        return {name: Duration.from_runs(duration).seconds for name, duration in durations.items()}
    except (Exception, KeyboardInterrupt):
        # Frameworks raise arbitrary errors, and the result does not depend on op timings.
        logger.debug("Timing ops failed", exc_info=True)
        return {}


def _predict_latencies(
    job: TuningJob, trials: Sequence[Trial], times: OpTimings
) -> dict[int, float]:
    """Return trial → latency predicted by op timings, relative to FP32; empty without these."""
    observations = job.model.observations
    predicted = {t.number: predict_latency(job.space, observations, times, t.plan) for t in trials}
    return {number: fraction for number, fraction in predicted.items() if fraction is not None}


def predict_latency(
    space: TuningSpace, observations: Observations, times: OpTimings, plan: PrecisionPlan
) -> float | None:
    """Return the latency of a plan predicted by op timings, relative to FP32; None without."""
    if not times.ops:
        return None
    # Imported on demand: SciPy is slow to import.
    from neural_mp.search.cost_model import CostInputs, predict_plan_time

    noise = apply_correction_nsr(observations, choose_best_corrections(observations))
    weights = {op.name: op.weights for op in space.graph}
    figures = CostInputs(noise, times=times, weights=weights, values=observations.elements)
    return predict_plan_time(space, figures, plan)


@dataclass(frozen=True)
class TuningResult:
    """The result of a run, always with a usable model.

    Attributes:
        model: the best model that met the target; the FP32 model if none did.
        plan: its resolved plan.
        fp32: the FP32 model in the runtime of the result.
        met: whether the target was met; None without a check.
        trials: every trial of the run, resumed ones included, oldest first.
        observations: result of calibration.
        record: the stored record of the run.
    """

    model: AnyModel
    plan: ResolvedPlan
    fp32: AnyTunableModel
    met: bool | None
    trials: tuple[Trial, ...]
    observations: Observations
    report: Report
    record: RunRecord


def report_of(job: TuningJob, selection: Selection, log: RunLog) -> Report:
    """Return the figures of a result except its accuracy, and end the log of the run."""
    speed, seconds = selection.speed.ratio, selection.speed.baseline
    effective = selection.plan.effective
    if speed is not None and speed.high < 1:
        log.add_warning(_make_slowdown_warning(job, speed))
    for warning in job.measurement.contention.contention_warnings:
        log.warn_once(warning)
    emulated = {p for op, p in effective.items() if p in job.space.capabilities[op].emulated}
    count = partial(_count_cpu_seconds, job, selection)
    baseline_cpu_seconds, cpu_seconds = log.run_optional_part(count, None) or (None, None)
    return Report(
        metric=job.evaluator.label,
        higher_is_better=job.settings.criterion.prefers_higher,
        **selection.speed.report_figures,
        baseline_cpu_seconds=baseline_cpu_seconds,
        cpu_seconds=cpu_seconds,
        batch_size=job.measurement.batch_size,
        streams=job.measurement.streams,
        baseline_size=job.model.size,
        size=selection.model.size,
        baseline_footprint=job.footprints.baseline_bytes,
        footprint=job.footprints(selection.model, selection.plan),
        evaluations=job.evaluator.evaluations,
        seconds=dict(log.seconds),
        effort_seconds=log.effort_seconds,
        source_precisions=tuple(p.value for p in job.space.graph.source_precisions),
        op_counts=count_ops(job.space.graph, effective),
        emulated=tuple(p.value for p in Precision if p in emulated),
        conversions=selection.model.conversions,
        ineligible=count_ineligible_reasons(
            job.space, job.space.contractions, job.settings.precisions
        ),
        amp=job.amp,
        warnings=tuple(log.warnings),
        cache_hits=tuple(log.cache_hits),
        stage_noise=log.stage_noise,
        runtimes=job.runtimes,
        accelerator=estimate_accelerator_figures(
            job.target_costs, job.space.graph, selection.plan.plan, log.width_sqnr_db
        ),
        hint=None
        if job.hint is None or seconds is None
        else log.run_optional_part(partial(job.hint, log.seconds, seconds), None),
    )


def _count_cpu_seconds(job: TuningJob, selection: Selection) -> list[float] | None:
    """Return the CPU seconds of the given model and of the result; None without latencies."""
    if selection.speed.result is None or job.measurement.workload is not None:
        return None
    return job.measurement.count_cpu_seconds([job.model, selection.model])


def estimate_accelerator_figures(
    costs: TargetCosts | None,
    graph: OpGraph,
    plan: PrecisionPlan,
    sqnr_db: Mapping[str, Mapping[str, float]] = MappingProxyType({}),
) -> AcceleratorFigures | None:
    """Return the estimates of a plan on an accelerator; None without costs, for CPUs.

    `sqnr_db` is that of `measure_width_sqnr`.
    """
    if costs is None:
        return None
    profile = costs.profile
    return AcceleratorFigures(
        profile.name,
        profile.title,
        profile.evidence,
        costs.estimate_objectives(plan)["relative_target"],
        costs.multiplication_shares(plan),
        Counter(op.type for op in graph if op.type in profile.refuse),
        sqnr_db,
    )


def measure_width_sqnr(space: TuningSpace, figures: WidthFigures) -> dict[str, dict[str, float]]:
    """Return op → widths → SQNR of the outputs in dB, if this op alone is in these.

    Widths without noise are left out.
    """
    noise = {
        op: {
            words_of(c): figures.op_noise(op, c)
            for c in space.choices(op)
            if c.activation and figures.is_measured(op, c)
        }
        for op in space.tunable_ops
    }
    return {
        op: {w: nsr_to_decibels(nsr) for w, nsr in by.items() if nsr} for op, by in noise.items()
    }


def _make_slowdown_warning(job: TuningJob, speed: Ratio) -> str:
    message = f"the result runs at {speed} the speed of {job.source_name} on this machine"
    if job.evaluates_accuracy:
        return message
    return (
        f"{message}, and its accuracy was not checked: every eligible op is converted, "
        f"even if that saves no time. Set a metric and evaluation data to convert only ops that "
        f"become faster, or use the {job.source_name} model"
    )
