"""FP32 ops of a result in other kernels than the framework's own, where measured as faster."""

from __future__ import annotations

import logging
from dataclasses import replace

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.criterion import Deadline
from neural_mp.core.enums import is_latency_only
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.trial import Trial
from neural_mp.profiling import estimate_latency_ratio
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.final_selection import Selection, compare_latency
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.objectives import make_latency_figures
from neural_mp.tuning.measurement.other_runtimes import measure_accuracy
from neural_mp.tuning.measurement.sqnr import output_sqnr_db

logger = logging.getLogger(__name__)

#: SQNR in dB, relative to the selected model, from which outputs differ by FP32 rounding only.
_FP32_ROUNDING_DB = 110.0


def with_faster_kernels(
    job: TuningJob,
    model: AnyTunableModel,
    selection: Selection,
    log: RunLog,
    deadline: Deadline,
    baseline: float | None = None,
) -> Selection:
    """Return a selection whose FP32 ops run in faster kernels; the same if that gains nothing.

    Ops are measured one by one, then the whole model. If the outputs differ by more than FP32
    rounding, as roundings to INT8 may flip, the accuracy is evaluated again. `baseline` is the
    accuracy of FP32; None without an accuracy check.
    """
    if not is_latency_only(job.objectives) or job.measurement.streams is not None:
        return selection
    if deadline.has_passed:
        if _ops_with_kernels(job, selection.plan):
            log.add_warning(f"FP32 kernels were not timed: {deadline} passed; {deadline.remedy}")
        return selection
    with (
        log.time_phase("kernels", "Timing FP32 kernels"),
        job.measurement.limit_threads([job.model]),
    ):
        plan = _plan_kernels(job, model, selection.plan)
        candidate = None if plan is None else _convert_and_run(job, model, plan)
    if plan is None or candidate is None:
        return selection
    with log.time_phase("measure", "Measuring FP32 kernels"):
        references = [job.model, *([selection.model] if selection.model is not job.model else [])]
        fp32_seconds, *chosen, seconds = job.measurement.measure_until_decided(
            [*references, candidate]
        )
    gain = estimate_latency_ratio(chosen[0] if chosen else fp32_seconds, seconds)
    if gain.low <= 1 or gain.value < job.measurement.min_speedup:
        return selection
    trial = selection.trial
    sqnr_db = output_sqnr_db(selection.model, candidate, [job.measurement.inputs])
    if sqnr_db is None or sqnr_db < _FP32_ROUNDING_DB:
        if not plan.has_low_precision:
            return selection
        accuracy = None
        if baseline is not None:
            title = "Evaluating FP32 kernels"
            accuracy = measure_accuracy(job, candidate, log, deadline, "evaluate", title)
            criterion = job.settings.criterion
            if accuracy is None or not job.evaluator.spread.meets_target(
                criterion, baseline, accuracy
            ):
                return selection
        if trial is not None:
            trial = replace(trial, accuracy=accuracy, metrics=job.evaluator.values or trial.metrics)
    speed = compare_latency(fp32_seconds, seconds)
    if trial is not None:
        figures = {**trial.objectives, **make_latency_figures(fp32_seconds, seconds)}
        trial = replace(trial, plan=plan.plan, objectives=figures)
    return replace(selection, model=candidate, plan=plan, speed=speed, trial=trial)


def _plan_kernels(
    job: TuningJob, model: AnyTunableModel, selected: ResolvedPlan
) -> ResolvedPlan | None:
    """Return the plan with faster kernels for its FP32 ops; None if there are none."""
    ops = _ops_with_kernels(job, selected)
    kernels = model.find_faster_kernels(job.measurement.inputs, ops) if ops else {}
    if not kernels:
        return None
    forms = {op: OpConfig(Precision.FP32, kernel=kernel) for op, kernel in kernels.items()}
    return job.space.resolve(selected.plan.replacing(forms))


def _ops_with_kernels(job: TuningJob, selected: ResolvedPlan) -> list[str]:
    """Return the FP32 ops of a plan that can run in other kernels."""
    return [
        op
        for op, precision in selected.effective.items()
        if precision is Precision.FP32 and job.space.capabilities[op].kernels
    ]


def _convert_and_run(job: TuningJob, model: AnyTunableModel, plan: ResolvedPlan) -> AnyModel | None:
    """Return the model of a plan; None if the model does not run."""
    try:
        candidate = model.convert_by_plan(plan)
        candidate(job.measurement.inputs)
    except Exception:
        # Frameworks raise arbitrary errors, and the selection runs without these kernels.
        logger.debug("faster kernels do not run", exc_info=True)
        return None
    return candidate


def latest_trials(trials: list[Trial], selection: Selection) -> list[Trial]:
    """Return the trials with that of the selection in its last form."""
    chosen = selection.trial
    if chosen is None:
        return trials
    return [chosen if trial.number == chosen.number else trial for trial in trials]
