"""What a run writes down of itself: once as it starts, and once as it ends."""

from __future__ import annotations

import logging
import math
import platform
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.graph import OpGraph
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware
from neural_mp.core.observations import OpTimings
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.core.trial import Trial
from neural_mp.runs.record import Conversion, Machine, RunEnd, RunStart
from neural_mp.runs.report import Report
from neural_mp.search.corrections import best_corrections, corrected_nsr
from neural_mp.space import Capability
from neural_mp.tuning.final_selection import Selection
from neural_mp.tuning.job import TuningJob
from neural_mp.util.environment import versions_of

logger = logging.getLogger(__name__)

#: Packages that a run depends on whatever its framework.
_PACKAGES = ("neural-mp", "numpy", "optuna")
#: Timing single ops takes so many runs of a batch.
_TIMED_RUNS = 8


def now() -> str:
    """The date and time, UTC, ISO 8601, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def setup_of(job: TuningJob) -> RunStart:
    """A run as it starts."""
    space = job.space
    return RunStart(
        started=now(),
        model=job.described.model,
        framework=job.model.adaptor.framework,
        graph=space.graph,
        capabilities={op: _bare(found) for op, found in space.capabilities.items()},
        tunable_ops=space.tunable_ops,
        tensors=space.tensors,
        fan_in=_fan_in(job.model),
        settings=job.described.settings,
        batch_size=job.measurement.batch_size,
        machine=machine_of(job.described.hardware),
        versions=_versions(job.model.adaptor.packages),
    )


def _bare(capability: Capability) -> Capability:
    configs = tuple(OpConfig(precision) for precision in capability.precisions)
    return Capability(configs, capability.reasons, capability.emulated)


def _fan_in(model: AnyTunableModel) -> dict[str, int]:
    """Op with a weight → how many products every number that it writes is the sum of."""
    offered = model.adaptor.corrections
    shapes = {
        op: (np.shape(layer.weight()), layer.outputs)
        for op, layer in (offered.layers(model.held) if offered else {}).items()
        if layer.inputs is not None
    }
    return {
        op: math.prod(shape) // shape[outputs] if shape[outputs] else 0
        for op, (shape, outputs) in shapes.items()
    }


def machine_of(hardware: Hardware) -> Machine:
    """A machine in words."""
    known = dict.fromkeys(flag for flags in NATIVE_FLAGS.values() for flag in flags)
    return Machine(
        hardware.name,
        hardware.cores,
        tuple(flag for flag in known if flag in hardware.flags),
        {precision.value: _runs(hardware, precision) for precision in Precision},
        f"{platform.system()} {platform.release()}, {platform.machine()}",
    )


def _runs(hardware: Hardware, precision: Precision) -> tuple[str, str]:
    support = hardware.support(precision)
    return support.runs, support.reason


def _versions(packages: Sequence[str]) -> dict[str, str]:
    return {"Python": platform.python_version(), **versions_of((*_PACKAGES, *packages))}


def ending_of(
    job: TuningJob,
    choice: Selection,
    met: bool | None,
    report: Report,
    seconds_allowed: float,
    times: OpTimings | None = None,
    trials: Sequence[Trial] = (),
) -> RunEnd:
    """A run as it ends.

    Args:
        job: the run.
        choice: what it came down to.
        met: whether the target was met.
        report: the figures.
        seconds_allowed: what timing single ops may take; where it would take longer, they are not.
        times: how long single ops take in every precision, where that was measured.
        trials: what was tried.
    """
    seconds = report.latency or 0.0
    if choice.model is not job.model:
        seconds += report.baseline_latency or 0.0
    before: Mapping[str, float] = {}
    after: Mapping[str, float] = {}
    if seconds * _TIMED_RUNS <= seconds_allowed:
        before = _profiled(job, job.model)
        after = before if choice.model is job.model else _profiled(job, choice.model)
    return RunEnd(
        now(),
        met,
        choice.plan.plan,
        report,
        None if choice.trial is None else choice.trial.number,
        choice.remeasured,
        _predicted(job, trials, times or OpTimings()),
        before,
        after,
        conversions_of(job.space.graph, choice.plan.flow, after),
    )


def _profiled(job: TuningJob, model: AnyModel) -> dict[str, float]:
    """Op → seconds; nothing where the framework cannot tell them."""
    try:
        with model.adaptor.threads(job.measurement.threads):
            return dict(model.profile(job.measurement.inputs))
    except (Exception, KeyboardInterrupt):
        # Whatever a framework raises: the result does not depend on it, and is not to be lost.
        logger.debug("ops could not be timed", exc_info=True)
        return {}


def _predicted(job: TuningJob, trials: Sequence[Trial], times: OpTimings) -> dict[int, float]:
    """Trial → its time as a share of FP32's, by the times of single ops; none without those."""
    if not times.ops or not trials:
        return {}
    # Not sooner, since it brings in SciPy.
    from neural_mp.search.cost_model import CostInputs, predicted_share

    observations = job.model.observations
    noise = corrected_nsr(observations, best_corrections(observations))
    weights = {op.name: op.weights for op in job.space.graph}
    figures = CostInputs(noise, times=times, weights=weights, values=observations.elements)
    shares = {t.number: predicted_share(job.space, figures, t.plan) for t in trials}
    return {number: share for number, share in shares.items() if share is not None}


def conversions_of(
    graph: OpGraph, flow: QuantizationFlow, seconds: Mapping[str, float]
) -> tuple[Conversion, ...]:
    """Where values change their type under a plan.

    Args:
        graph: the model.
        flow: what follows from the plan.
        seconds: op, or conversion by a name of its own → seconds of one run; a conversion bears
            the name of what it converts, with a word behind a slash.
    """
    found = []
    for name in (*graph.inputs, *(op.name for op in graph)):
        for kind, readers in _converted_for(graph, flow, name).items():
            taken = [
                value
                for said, value in seconds.items()
                if said.startswith(f"{name}/") and said not in graph
            ]
            found.append(Conversion(name, tuple(readers), kind, sum(taken) if taken else None))
    return tuple(found)


def _converted_for(graph: OpGraph, flow: QuantizationFlow, name: str) -> dict[str, list[str]]:
    """Kind of conversion → the ops that read a tensor converted so."""
    found: dict[str, list[str]] = {}
    written = flow.effective.get(name, Precision.FP32)
    for reader in graph.consumer_names(name):
        quantized = name in flow.int8_reads.get(reader, ())
        if quantized != (name in flow.int8_outputs):
            found.setdefault("quantize" if quantized else "dequantize", []).append(reader)
        elif not quantized:
            runs = flow.effective[reader]
            low = {p for p in (written, runs) if p.is_16_bit}
            if low and written is not runs and Precision.INT8 not in (written, runs):
                found.setdefault("cast", []).append(reader)
    return found
