"""Records of a run at its start and end."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware
from neural_mp.core.op_timings import (
    FULL_PROFILE,
    SHOWN_PROFILE,
    Duration,
    OpTimings,
    ProfileRuns,
)
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.runs.report import Machine, Report, RunEnd, RunStart
from neural_mp.search.corrections import best_corrections, corrected_nsr
from neural_mp.space import Capability, TuningSpace
from neural_mp.tuning.conversions import conversions_of
from neural_mp.tuning.final_selection import Selection
from neural_mp.tuning.job import TuningJob
from neural_mp.util.environment import versions_of

logger = logging.getLogger(__name__)

#: Packages that every run depends on, besides its framework.
_PACKAGES = ("neural-mp", "numpy", "optuna")
#: Op or conversion → seconds.
Profile = Mapping[str, float]


def now() -> str:
    """Return date and time in UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def setup_of(job: TuningJob) -> RunStart:
    """Return the record of the start of a run."""
    space, packages = job.space, (*_PACKAGES, *job.model.adaptor.packages)
    return RunStart(
        started=now(),
        model=job.description.model,
        framework=job.model.adaptor.framework,
        graph=space.graph,
        capabilities={op: _bare(capability) for op, capability in space.capabilities.items()},
        tunable_ops=space.tunable_ops,
        tensors=space.tensors,
        fan_in=_fan_in(job.model),
        settings=job.description.settings,
        batch_size=job.measurement.batch_size,
        machine=machine_of(job.description.hardware),
        versions={"Python": platform.python_version(), **versions_of(packages)},
        runtimes=job.runtimes,
    )


def setup_in_space(setup: RunStart, space: TuningSpace) -> RunStart:
    """Return the record of a start with the space that calibration left."""
    return replace(
        setup,
        graph=space.graph,
        capabilities={op: _bare(capability) for op, capability in space.capabilities.items()},
        tunable_ops=space.tunable_ops,
        tensors=space.tensors,
    )


def _bare(capability: Capability) -> Capability:
    configs = tuple(OpConfig(precision) for precision in capability.precisions)
    return Capability(configs, capability.reasons, capability.emulated)


def _fan_in(model: AnyTunableModel) -> dict[str, int]:
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


def machine_of(hardware: Hardware) -> Machine:
    """Return the description of a machine."""
    native = dict.fromkeys(flag for flags in NATIVE_FLAGS.values() for flag in flags)
    return Machine(
        hardware.name,
        hardware.cores,
        tuple(flag for flag in native if flag in hardware.flags),
        {
            precision.value: (support.runs, support.reason)
            for precision in Precision
            for support in [hardware.support(precision)]
        },
        f"{platform.system()} {platform.release()}, {platform.machine()}",
    )


def ending_of(
    job: TuningJob,
    selection: Selection,
    met: bool | None,
    report: Report,
    seconds_allowed: float,
    times: OpTimings | None = None,
    trials: Sequence[Trial] = (),
) -> RunEnd:
    """Return the record of the end of a run.

    Ops are timed in few runs, or on one sample, if more takes longer than `seconds_allowed`;
    `times` are those of the search.
    """
    seconds = report.latency or 0.0
    if selection.model is not job.model:
        seconds += report.baseline_latency or 0.0
    runs, samples = _sampling(seconds, seconds_allowed, job.measurement.batch_size)
    fp32_profile = _profiled(job, job.model, runs, samples)
    profile = fp32_profile
    if selection.model is not job.model:
        profile = _profiled(job, selection.model, runs, samples)
    return RunEnd(
        now(),
        met,
        selection.plan.plan,
        report,
        None if selection.trial is None else selection.trial.number,
        selection.remeasured,
        _predicted(job, trials, times or OpTimings()),
        fp32_profile,
        profile,
        conversions_of(job.space.graph, selection.plan.flow, profile),
        samples,
    )


def _sampling(seconds: float, allowed: float, batch_size: int) -> tuple[ProfileRuns, int | None]:
    """Return how often to run ops, and on how many samples (None: the timed batch)."""
    if seconds * sum(FULL_PROFILE) <= allowed:
        return FULL_PROFILE, None
    few = seconds * sum(SHOWN_PROFILE) <= allowed or batch_size <= 1
    return SHOWN_PROFILE, None if few else 1


def _profiled(job: TuningJob, model: AnyModel, runs: ProfileRuns, samples: int | None) -> Profile:
    """Return op → seconds; empty if the framework does not support profiling."""
    try:
        inputs = job.measurement.inputs if samples is None else job.model.example_inputs(samples)
        with model.adaptor.threads(job.measurement.threads):
            durations = model.profile(inputs, runs)
        return {name: Duration.of(duration).seconds for name, duration in durations.items()}
    except (Exception, KeyboardInterrupt):
        # Frameworks raise arbitrary errors, and the result does not depend on op timings.
        logger.debug("Timing ops failed", exc_info=True)
        return {}


def _predicted(job: TuningJob, trials: Sequence[Trial], times: OpTimings) -> dict[int, float]:
    """Return trial → latency predicted by op timings, relative to FP32; empty without these."""
    if not times.ops or not trials:
        return {}
    # Imported on demand: SciPy is slow to import.
    from neural_mp.search.cost_model import CostInputs, predicted_time

    observations = job.model.observations
    noise = corrected_nsr(observations, best_corrections(observations))
    weights = {op.name: op.weights for op in job.space.graph}
    figures = CostInputs(noise, times=times, weights=weights, values=observations.elements)
    predicted = {t.number: predicted_time(job.space, figures, t.plan) for t in trials}
    return {number: fraction for number, fraction in predicted.items() if fraction is not None}
