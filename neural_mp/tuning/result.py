"""The result of a tuning run, and the report of its figures."""

from __future__ import annotations

from dataclasses import dataclass

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.observations import Observations
from neural_mp.core.trial import Trial
from neural_mp.profiling import Ratio
from neural_mp.runs.report import Report, RunRecord, count_ops, emulated_precisions
from neural_mp.space import ResolvedPlan, counted_reasons
from neural_mp.tuning.final_selection import Selection
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog


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
        report: the figures.
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
    speed, effective = selection.speed.ratio, selection.plan.effective
    if speed is not None and speed.high < 1:
        log.warn(_slower(job, speed))
    return Report(
        metric=job.evaluator.label,
        higher_is_better=job.settings.criterion.prefers_higher,
        **selection.speed.figures,
        batch_size=job.measurement.batch_size,
        streams=job.measurement.streams,
        baseline_size=job.model.size,
        size=selection.model.size,
        baseline_footprint=job.footprints.baseline,
        footprint=job.footprints(selection.model, selection.plan),
        evaluations=job.evaluator.evaluations,
        seconds=dict(log.seconds),
        source_precisions=tuple(p.value for p in job.space.graph.source_precisions),
        op_counts=count_ops(job.space.graph, effective),
        emulated=emulated_precisions(job.space, effective),
        conversions=selection.model.conversions,
        ineligible=counted_reasons(job.space, job.space.contractions, job.settings.precisions),
        amp=job.amp,
        warnings=tuple(log.warnings),
        cache_hits=tuple(log.cache_hits),
        stage_noise=log.stage_noise,
        runtimes=job.runtimes,
        hint=None if job.hint is None else job.hint(log.seconds, selection.speed.baseline),
    )


def _slower(job: TuningJob, speed: Ratio) -> str:
    """Return the warning for a result that is slower than the given model."""
    message = f"the result runs at {speed} the speed of {job.source_name} on this machine"
    if job.evaluates:
        return message
    return (
        f"{message}, and its accuracy was not checked: every eligible op is converted, "
        f"even if that saves no time. Set a metric and evaluation data to convert only ops that "
        f"become faster, or use the {job.source_name} model"
    )
