"""The tuning loop: a strategy proposes plans, which are converted, evaluated and recorded."""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Sequence
from dataclasses import asdict, replace
from functools import partial

from neural_mp.adaptors.loaded_model import AnyTunableModel
from neural_mp.core.criterion import Deadline, DeadlineExceededError, UnreturnedCallError
from neural_mp.core.hardware import detect
from neural_mp.core.trial import Trial
from neural_mp.errors import NeuralMPError, TuningError
from neural_mp.runs.history import History
from neural_mp.runs.report import ELEMENTS, LAYER_ERRORS
from neural_mp.strategies.base import Search
from neural_mp.tuning.baseline import Baseline, calibrate_model, obtain_measured_baseline
from neural_mp.tuning.evaluation.early_stopping import RunningValues
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluator
from neural_mp.tuning.evaluation.sharding import ShardingPolicy
from neural_mp.tuning.final_selection import (
    Selection,
    explain_fp32_result,
    find_best_slow,
    find_closest_trial,
    select_fp32,
    select_plan,
    with_figures,
)
from neural_mp.tuning.job import TuningJob, cache_of_probes, make_tuning_problem
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.comparison import measure_stage_noise
from neural_mp.tuning.measurement.float_kernels import latest_trials, with_faster_kernels
from neural_mp.tuning.measurement.objectives import find_best_trial
from neural_mp.tuning.measurement.other_runtimes import Settlement, settle_runtime
from neural_mp.tuning.measurement.probe import LEAST_ALLOWANCE, MeasuringProbe
from neural_mp.tuning.recording import (
    NO_PROFILE,
    Profile,
    TuningResult,
    measure_width_sqnr,
    record_run_ending,
    record_run_setup,
    report_of,
    setup_in_space,
)
from neural_mp.tuning.trial_runner import TrialRunner, train_closest_plan
from neural_mp.tuning.unchecked import convert_without_check
from neural_mp.util.user_calls import ReraiseUserErrors
from neural_mp.util.validators import mapping_of, non_negative_float

logger = logging.getLogger(__name__)


def tune(job: TuningJob, log: RunLog | None = None) -> TuningResult:
    """Run a job; return its best model.

    Raises:
        MetricError: the FP32 model's accuracy is not a number.
        TuningError: every plan fails with the same error.
        BaseException: whatever the user's code raised, unchanged.
    """
    log = log or RunLog()
    try:
        with ReraiseUserErrors():
            if not job.evaluates_accuracy:
                return convert_without_check(job, log)
            with job.open_history() as history:
                return _search_with_history(job, log, history)
    finally:
        log.calls.close()
        log.listener.close()


def _search_with_history(job: TuningJob, log: RunLog, history: History) -> TuningResult:
    setup = record_run_setup(job)
    history.begin_run(setup, job.description.source)
    deadline = log.calls.deadline = Deadline(job.settings.exit_policy.timeout)
    resumed = _list_resumed_trials(job, history)
    baseline: Baseline | None = None
    try:
        baseline = obtain_measured_baseline(job, history, log, deadline)
        log.calls.evaluation_seconds = baseline.seconds
        model = calibrate_model(job, log, deadline, history)
    except DeadlineExceededError as error:
        if baseline is None and isinstance(error, UnreturnedCallError):
            raise  # the FP32 model, or its evaluation, is no result
        log.warn_of_call(error)
        log.add_warning("the time limit passed before the search; the model stays FP32")
        with log.time_phase("measure"):
            selection = log.calls.run_part(lambda: select_fp32(job))
        return _make_checked_result(
            job, log, history, Settlement(job, selection), baseline, resumed
        )
    timeout, deadline = deadline, job.limit_by_effort(deadline, baseline.seconds, log)
    if model.space is not job.space:
        job = job.in_space(model.space)
        history.begin_run(setup_in_space(setup, model.space))
    history.cache.put_entry(ELEMENTS, dict(job.footprints.element_counts))
    cache = cache_of_probes(job, model.observations)
    probe_end = deadline.end_time - baseline.reserved_seconds
    probe = MeasuringProbe(
        job,
        model,
        history.cache,
        measurement_allowance(job, baseline),
        cache=cache,
        end_time=probe_end,
    )
    search = _TrialSearch(job, model, history, baseline, log, deadline, resumed)
    learning = model.options.learning.limit
    with (
        log.time_phase("search"),
        learning.override_end(probe_end),
    ):
        search.drive_search(job.strategy.search(make_tuning_problem(job, model, probe)))
    if learning.ended_work:
        log.add_warning(
            f"the learning of weights ended at {deadline}; other layers are rounded to nearest, "
            f"{deadline.remedy}"
        )
    log.seconds["probe"] = probe.seconds
    log.width_sqnr_db = (
        {} if probe.widths is None else measure_width_sqnr(model.space, probe.widths)
    )
    _record_layer_errors(model, history, log)
    if probe.has_cache_hits:
        log.cache_hit("op times and output noise")
    if probe.untimed:
        log.add_warning(f"op times were estimated, because not all ops were timed: {probe.untimed}")
    selection, trials = _select_result(job, model, search.trials, search.measured_alone, log)
    replacement, trained = None, None
    if selection.trial is None:
        # Training has a limit of its own, `exit_policy.train_seconds`.
        replacement, trained = train_closest_plan(
            job, model, trials, baseline, history, log, timeout
        )
        trials += [] if trained is None else [trained]
    if replacement is not None:
        selection = replacement
    elif selection.trial is None:
        # The result is the user's own model, without kernels for its FP32 ops.
        log.add_warning(explain_fp32_result(job, trials, baseline.accuracy))
    else:
        faster = partial(
            with_faster_kernels, job, model, selection, log, deadline, baseline.accuracy
        )
        selection = log.run_optional_part(faster, selection)
    if trained is None:
        noise = partial(measure_stage_noise, job, model, selection.plan, log)
        log.stage_noise = log.run_optional_part(noise, None)
    trials = latest_trials(trials, selection)
    settle = partial(settle_runtime, job, selection, baseline.accuracy, log, deadline)
    settlement = log.run_optional_part(settle, Settlement(job, selection))
    return _make_checked_result(job, log, history, settlement, baseline, trials, probe.fp32_profile)


def _list_resumed_trials(job: TuningJob, history: History) -> list[Trial]:
    """Return the trials of an interrupted run whose plans are still within limits."""
    resumed = []
    for trial in history.read_trials():
        if trial.trained:
            continue  # The weights are in the checkpoints of the training, which continues there.
        try:
            plan = job.space.resolve(trial.plan)
        except NeuralMPError:
            continue
        if plan.plan == trial.plan:
            resumed.append(job.rate_trial(trial, plan))
    return resumed


def _record_layer_errors(model: AnyTunableModel, history: History, log: RunLog) -> None:
    kind = mapping_of(mapping_of(non_negative_float))
    _, stored = history.cache.get_entry(LAYER_ERRORS, kind)
    errors = {op: asdict(layer) for op, layer in model.corrected_weights.layer_errors.items()}
    if errors:
        history.cache.put_entry(LAYER_ERRORS, {**(stored or {}), **errors})
        log.seconds["reconstruction"] = sum(layer["seconds"] for layer in errors.values())


def measurement_allowance(job: TuningJob, baseline: Baseline | None) -> float:
    """Return the CPU seconds for measurements besides trials: those of one evaluation."""
    threads = job.measurement.threads or detect().cores
    return max(LEAST_ALLOWANCE * threads, 0.0 if baseline is None else baseline.cpu_seconds)


class _TrialSearch:
    """The search phase of a run; its list of trials grows."""

    def __init__(
        self,
        job: TuningJob,
        model: AnyTunableModel,
        history: History,
        baseline: Baseline,
        log: RunLog,
        deadline: Deadline,
        trials: Sequence[Trial],
    ) -> None:
        settings = job.settings
        plan_evaluator = PlanEvaluator(
            model,
            job.evaluator,
            settings.criterion,
            baseline.accuracy,
            baseline.running if settings.early_stopping else RunningValues(),
            job.measurement.inputs,
            baseline.reserved_seconds,
        )
        self.job, self.log, self.trials = job, log, list(trials)
        self._deadline = deadline
        sharding = ShardingPolicy(
            job.evaluator, baseline.seconds, baseline.cpu_seconds, log.add_warning
        )
        self._runner = TrialRunner(job, history, log, deadline, plan_evaluator, sharding)

    @property
    def measured_alone(self) -> Collection[int]:
        """Numbers of trials measured in this run without parallel trials."""
        return self._runner.measured_alone

    def drive_search(self, search: Search) -> None:
        """Run until the strategy ends, a limit is reached or the user interrupts."""
        try:
            self._feed_search(search, self.job.settings.exit_policy.max_trials)
        except StopIteration:
            return
        except DeadlineExceededError as error:
            self.log.warn_of_call(error)
            self.log.add_warning(f"the search stopped at {self._deadline}; {self._deadline.remedy}")
        except TuningError as error:
            if not any(trial.met for trial in self.trials):
                raise
            self.log.add_warning(f"the search stopped: {error}")
        except KeyboardInterrupt:
            self.log.add_warning(
                "the search was interrupted; its trials are kept, and resume continues the run"
            )
        finally:
            self._runner.stop_workers()

    def _feed_search(self, search: Search, limit: int) -> None:
        tried = {trial.plan: trial for trial in self.trials}
        calls = self.log.calls
        plans = calls.run_part(lambda: next(search))
        while True:
            resolved = [self.job.space.resolve(plan) for plan in plans]
            new = [plan for plan in dict.fromkeys(resolved) if plan.plan not in tried]
            room = max(0, limit - len(self.trials))
            for trial in self._runner.run_plans(new[:room], len(self.trials) + 1):
                tried[trial.plan] = trial
                self.trials.append(trial)
            if len(new) > room:
                self.log.add_warning(f"the search stopped at max_trials = {limit}")
                return
            results = [tried[plan.plan] for plan in resolved]
            plans = calls.run_part(partial(search.send, results))


def _select_result(
    job: TuningJob,
    model: AnyTunableModel,
    trials: Sequence[Trial],
    measured_alone: Collection[int],
    log: RunLog,
) -> tuple[Selection, list[Trial]]:
    """Return the selection, and the trials with their latest figures."""
    measured = [
        log.run_optional_part(partial(_with_missing_figures, job, model, trial), trial)
        for trial in trials
    ]
    try:
        with log.time_phase("measure", "Measuring the best plans"):
            select = partial(select_plan, job, measured, model, measured_alone)
            selection = log.calls.run_part(select)
    except (KeyboardInterrupt, UnreturnedCallError) as error:
        log.warn_of_call(error)
        log.add_warning("the final measurement was interrupted; latencies are those of the trials")
        best = find_best_trial(measured, job.objectives)
        if best is None:
            return log.calls.run_part(lambda: select_fp32(job)), measured
        plan = job.space.resolve(best.plan)
        return with_figures(best, plan, model.convert_by_plan(plan)), measured
    latest = {trial.number: trial for trial in selection.slower_than_fp32}
    return selection, [latest.get(trial.number, trial) for trial in measured]


def _with_missing_figures(job: TuningJob, model: AnyTunableModel, trial: Trial) -> Trial:
    """Return a trial of a resumed run with the figures of changed objectives."""
    if not trial.meets_accuracy or math.isfinite(trial.relative_cost(job.objectives)):
        return trial
    plan = job.space.resolve(trial.plan)
    figures = job.measure_objectives(model.convert_by_plan(plan), plan)
    return job.rate_trial(replace(trial, objectives={**trial.objectives, **figures}), plan)


def _make_checked_result(
    job: TuningJob,
    log: RunLog,
    history: History,
    settlement: Settlement,
    baseline: Baseline | None,
    trials: Sequence[Trial],
    fp32_profile: Profile = NO_PROFILE,
) -> TuningResult:
    if history.degraded_because:
        log.add_warning(history.degraded_because)
    reference = baseline.accuracy if baseline is not None else None
    selection, settled_job, rejected = settlement.selection, settlement.job, settlement.rejected
    trial = selection.trial
    accuracy = trial.accuracy if trial else settlement.accuracy
    report = replace(
        report_of(settled_job, selection, log),
        baseline_accuracy=reference,
        accuracy=reference if accuracy is None else accuracy,
        metrics=settlement.metrics
        or job.evaluator.metric_figures(trial.metrics if trial else None),
        target=job.settings.criterion.target(reference) if reference is not None else None,
        best_rejected=None
        if trial
        else rejected or find_best_slow(trials, job.objectives) or find_closest_trial(trials),
    )
    if rejected is not None:
        trials = [rejected if t.number == rejected.number else t for t in trials]
    met = trial is not None
    so_far = history.read_record()
    recorded = settlement.make_recorded_selection(job)
    ending = record_run_ending(
        job, recorded, met, report, so_far.measured.times, trials, fp32_profile
    )
    history.end_run(ending)
    record = history.read_record()
    return TuningResult(
        selection.model,
        selection.plan,
        settled_job.model,
        met,
        tuple(trials),
        record.observations,
        report,
        record,
    )
