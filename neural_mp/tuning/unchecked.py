"""Runs without accuracy check: measured time alone decides which ops are converted."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.criterion import Deadline, DeadlineExceededError, UnreturnedCallError
from neural_mp.core.enums import is_latency_only
from neural_mp.core.hardware import detect
from neural_mp.core.observations import KeptOutputs, Observations
from neural_mp.core.op_timings import OpTimings
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import DataError
from neural_mp.io.measurement_cache import RunCache
from neural_mp.runs.report import ProbeMeasurements, Report, RunRecord, RunStart
from neural_mp.search.corrections import choose_best_corrections, with_corrections
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.baseline import calibrate_model
from neural_mp.tuning.evaluation.plan_evaluator import describe_error
from neural_mp.tuning.final_selection import (
    UNMEASURED,
    LatencyComparison,
    Selection,
    compare_latency,
    format_too_slow,
    select_fp32,
)
from neural_mp.tuning.job import TuningJob, make_tuning_problem
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.float_kernels import with_faster_kernels
from neural_mp.tuning.measurement.objectives import make_latency_figures
from neural_mp.tuning.measurement.op_timing import loses_in_int8
from neural_mp.tuning.measurement.other_runtimes import (
    Settlement,
    settle_runtime,
    speeds_over_runtimes,
)
from neural_mp.tuning.measurement.probe import BRIEF, MeasuringProbe
from neural_mp.tuning.measurement.sqnr import Fidelity, TimedRun, compared_with_fp32, warn_of_noise
from neural_mp.tuning.recording import (
    TuningResult,
    record_run_ending,
    record_run_setup,
    report_of,
    setup_in_space,
)
from neural_mp.util.user_calls import UserCodeError

logger = logging.getLogger(__name__)

#: CPU seconds of measurements that choose a plan, as a fraction of calibration and conversion; and
#: their minimum per thread.
_SHARE, _LEAST_SECONDS = 0.25, 1.0
#: Runs of a plan that is compared with others, after those of its conversion.
_COMPARED_RUNS = 3
#: Factor on these seconds if INT8 slows down ops: the fastest plan is then one of many.
_LONGER_IF_MIXED = 2
_EVERY_OP = "exit_policy={'performance_only': True} converts every eligible op, whatever its gain"
_NO_TIMES = OpTimings()


@dataclass(frozen=True)
class _Choice:
    """The plan of a run without accuracy check.

    Attributes:
        model: its model.
        times: times of single ops; empty if not measured.
        fp32_run: the run of the FP32 model that showed that these take too long.
        failed: the trials of plans whose models do not run.
    """

    plan: ResolvedPlan
    model: AnyModel
    times: OpTimings = _NO_TIMES
    fp32_run: TimedRun | None = None
    failed: tuple[Trial, ...] = ()


def decides_by_time(job: TuningJob, plan: ResolvedPlan) -> bool:
    """Whether a plan without accuracy check has to gain time.

    False with `performance_only`, which converts as many ops as possible; and if another objective
    or the numerics of a precision are wanted.
    """
    every_op = job.settings.exit_policy.performance_only or not is_latency_only(job.objectives)
    return not every_op and job.claims_speed(plan)


def convert_without_check(job: TuningJob, log: RunLog) -> TuningResult:
    """Convert the ops that become faster, or as many as possible, without an accuracy check."""
    limit = job.settings.size_limit
    is_timed = not limit.is_set and decides_by_time(
        job, job.space.resolve(job.space.fastest_plan())
    )
    log.add_warning(_explain_missing_check(job, is_timed))
    setup = record_run_setup(job)
    deadline, fp32_outputs = Deadline(job.settings.exit_policy.timeout), KeptOutputs()
    log.calls.deadline = deadline
    started = time.process_time()
    try:
        model = calibrate_model(job, log, deadline, kept=fp32_outputs)
    except DeadlineExceededError as error:
        return _keep_fp32(job, setup, log, error, "the time limit passed during calibration")
    deadline = job.limit_by_effort(deadline, log.seconds.get("load", 0.0), log)
    if model.space is not job.space:
        job, setup = job.in_space(model.space), setup_in_space(setup, model.space)

    def choose_and_measure() -> tuple[_Choice, Fidelity | None, Selection]:
        chosen = (_choose_within_size if limit.is_set else _choose_every_op)(job, model, log)
        if is_timed and chosen.plan.has_low_precision:
            allowance = _compute_choice_allowance(job, time.process_time() - started, deadline)
            chosen = _choose_fastest(job, model, chosen, allowance, log)
        return chosen, *_compare_and_measure(job, chosen, log, fp32_outputs)

    try:
        chosen, fidelity, selection = log.calls.run_part(choose_and_measure)
    except UnreturnedCallError as error:
        return _keep_fp32(job, setup, log, error, "no plan was measured")
    every_op = limit.is_set or job.settings.exit_policy.performance_only
    is_judged = is_timed or not (every_op or is_latency_only(job.objectives))
    slow = selection.slower_than_fp32[0] if is_judged and selection.slower_than_fp32 else None
    if slow is not None:
        log.add_warning(f"no plan is {format_too_slow(job, slow)}; {_EVERY_OP}")
        selection = _in_fp32(job, selection)
    is_converted = selection.model is chosen.model
    if is_timed or not selection.plan.has_low_precision:
        faster = partial(with_faster_kernels, job, model, selection, log, deadline)
        selection = log.run_optional_part(faster, selection)
    measured = selection.model
    if is_timed:
        settle = partial(settle_runtime, job, selection, None, log, deadline)
        settlement = log.run_optional_part(settle, Settlement(job, selection))
    else:
        compare = partial(speeds_over_runtimes, job, selection, log)
        settlement = Settlement(log.run_optional_part(compare, job), selection)
    settled_job, selection = settlement.job, settlement.selection
    is_kept = is_converted and selection.model is measured
    shown = fidelity if is_kept else None
    if shown is not None:
        warn_of_noise(shown, log)
    rejected = slow or next(iter(chosen.failed), None)
    sqnr_db = None if shown is None else shown.sqnr_db
    report = replace(
        report_of(settled_job, selection, log), output_sqnr_db=sqnr_db, best_rejected=rejected
    )
    observations, recorded = model.observations, settlement.make_recorded_selection(job)
    result = _make_unchecked_result(
        job, setup, selection, report, observations, recorded, settled_job.model, chosen.times
    )
    return replace(result, trials=chosen.failed)


def _keep_fp32(
    job: TuningJob, setup: RunStart, log: RunLog, error: DeadlineExceededError, reason: str
) -> TuningResult:
    """Return the FP32 model as the result, for a reason."""
    log.warn_of_call(error)
    log.add_warning(f"{reason}; the model stays FP32")
    with log.time_phase("measure"):
        selection = log.calls.run_part(lambda: select_fp32(job))
    report = report_of(job, selection, log)
    return _make_unchecked_result(
        job, setup, selection, report, Observations(), selection, job.model
    )


def _compare_and_measure(
    job: TuningJob, chosen: _Choice, log: RunLog, fp32_outputs: KeptOutputs
) -> tuple[Fidelity | None, Selection]:
    """Return the deviation of a plan from FP32, None for FP32, and its selection with latency."""
    fidelity: Fidelity | None = None
    rounds: Sequence[Sequence[float]] = ()
    if chosen.model is not job.model:
        fidelity, rounds = compared_with_fp32(job, chosen.model, log, fp32_outputs, chosen.fp32_run)
    with log.time_phase("measure", "Measuring latency"):
        if chosen.model is job.model:
            return fidelity, select_fp32(job)
        return fidelity, _measure_choice(job, chosen, rounds)


def _choose_every_op(job: TuningJob, model: AnyTunableModel, log: RunLog) -> _Choice:
    """Return the plan with as many ops as possible in their lowest precision."""
    corrections = choose_best_corrections(model.observations)
    every_op = job.space.resolve(with_corrections(job.space.fastest_plan(), job.space, corrections))
    with log.time_phase("convert", "Converting"):
        converted = _convert_and_run(job, model, every_op, log)
    if isinstance(converted, Trial):
        log.add_warning(f"the result is the {job.source_name} model")
        fp32 = job.space.resolve(job.space.fp32_plan())
        return _Choice(fp32, job.model, failed=(converted,))
    return _Choice(every_op, converted)


def _convert_and_run(
    job: TuningJob,
    model: AnyTunableModel,
    plan: ResolvedPlan,
    log: RunLog,
    memo: AnyModel | None = None,
) -> AnyModel | Trial:
    """Return the model of a plan, `memo` or converted; a failed trial if the model does not run."""
    try:
        converted = memo or model.convert_by_plan(plan)
        if converted is not model:
            converted(job.measurement.inputs)
        model.check_fusions(converted, job.measurement.inputs)
    except (UserCodeError, DataError):
        raise
    except Exception as error:
        # Frameworks raise arbitrary errors, and a failed plan must not end the run.
        logger.debug("A plan does not run", exc_info=True)
        reason = describe_error(error)
        log.add_warning(f"a plan failed: {plan.plan!r}: {reason}")
        return Trial(plan.plan, Outcome.FAILED, error=reason)
    return converted


def _choose_within_size(job: TuningJob, model: AnyTunableModel, log: RunLog) -> _Choice:
    """Return the most accurate plan within the limit of size."""
    # Imported on demand: SciPy is slow to import.
    from neural_mp.tuning.size_budget import find_plan_within_limit

    choice = find_plan_within_limit(job, model, job.settings.size_limit, log)
    return _Choice(choice.plan, choice.model)


def _choose_fastest(
    job: TuningJob, model: AnyTunableModel, every_op: _Choice, allowance: float, log: RunLog
) -> _Choice:
    """Return the fastest plan by op times and by latencies of a few whole models."""
    # Imported on demand: SciPy is slow to import.
    from neural_mp.strategies.mincut import fastest_by_time

    brief = replace(job.measurement, warmup=0, iterations=_COMPARED_RUNS, time_limit=allowance)
    timed = replace(job, measurement=brief)
    models = {every_op.plan: every_op.model}
    probe = MeasuringProbe(timed, model, RunCache(), allowance, effort=BRIEF, converted=models)
    with log.time_phase("probe", "Timing ops"):
        times = probe.times()
        if loses_in_int8(times):
            probe.allowance *= _LONGER_IF_MIXED
        plan = job.space.resolve(fastest_by_time(make_tuning_problem(timed, model, probe)))
    if plan == every_op.plan:
        return replace(every_op, times=times, fp32_run=probe.gauge)
    with log.time_phase("convert"):
        converted = _convert_and_run(job, model, plan, log, models.get(plan))
    if isinstance(converted, Trial):
        return replace(every_op, times=times, failed=(converted,))
    return _Choice(plan, converted, times, probe.gauge)


def _compute_choice_allowance(job: TuningJob, spent: float, deadline: Deadline) -> float:
    """Return the CPU seconds for the choice of a plan, after those of calibration."""
    threads = job.measurement.threads or detect().cores
    allowed = max(_SHARE * spent, _LEAST_SECONDS * threads)
    remaining = deadline.seconds_left()
    return min(allowed, remaining * threads) if remaining else allowed


def _measure_choice(
    job: TuningJob, chosen: _Choice, rounds: Sequence[Sequence[float]]
) -> Selection:
    """Return a plan with its latency, and its trial if the plan gains too little over FP32.

    `rounds` are the seconds of FP32 and the plan in rounds just measured, as in
    `Measurement.measure_rounds`.
    """
    if job.target is not None:
        figures = job.measure_objectives(chosen.model, chosen.plan)
        trial = job.rate_trial(
            Trial(chosen.plan.plan, Outcome.MET, objectives=figures), chosen.plan
        )
        slow = () if trial.met else (trial,)
        return Selection(chosen.model, chosen.plan, UNMEASURED, slower_than_fp32=slow)
    baseline, candidate = job.measurement.measure_rounds([job.model, chosen.model], earlier=rounds)
    sizes = job.measure_sizes(chosen.model, chosen.plan)
    figures = {**sizes, **make_latency_figures(baseline, candidate)}
    trial = job.rate_trial(Trial(chosen.plan.plan, Outcome.MET, objectives=figures), chosen.plan)
    slow = () if trial.met else (trial,)
    return Selection(
        chosen.model, chosen.plan, compare_latency(baseline, candidate), slower_than_fp32=slow
    )


def _in_fp32(job: TuningJob, slow: Selection) -> Selection:
    seconds = slow.speed.baseline
    plan = job.space.resolve(job.space.fp32_plan())
    return replace(slow, model=job.model, plan=plan, speed=LatencyComparison(seconds, seconds))


def _make_unchecked_result(
    job: TuningJob,
    setup: RunStart,
    selection: Selection,
    report: Report,
    observations: Observations,
    recorded: Selection,
    fp32: AnyTunableModel,
    times: OpTimings = _NO_TIMES,
) -> TuningResult:
    """Return a result without accuracy check, which no history stores."""
    measured = ProbeMeasurements(elements=dict(job.footprints.element_counts), times=times)
    ending = record_run_ending(job, recorded, None, report, times)
    record = RunRecord(setup, observations=observations, measured=measured, ending=ending)
    return TuningResult(
        selection.model, selection.plan, fp32, None, (), observations, report, record
    )


def _explain_missing_check(job: TuningJob, is_timed: bool) -> str:
    if job.settings.size_limit.is_set:
        return (
            f"accuracy was not checked: {job.settings.size_limit} asks for the most accurate plan "
            f"of that size, by the divergence of each weight"
        )
    why = (
        "performance_only is set"
        if job.settings.exit_policy.performance_only
        else "set eval_func, or metric and eval_dataloader, to check the accuracy"
    )
    which = (
        "ops are converted where that saves time" if is_timed else "every eligible op is converted"
    )
    return f"accuracy was not checked: {why}; {which}"
