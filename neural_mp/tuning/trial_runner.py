"""Trials of plans, sequentially or in parallel, and of the most promising plan after training."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.criterion import Deadline, DeadlineExceededError, UnreturnedCallError
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import (
    ConfigurationError,
    ConversionError,
    NeuralMPError,
    TrainingError,
    TuningError,
    message_of,
)
from neural_mp.runs.history import History
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.baseline import Baseline
from neural_mp.tuning.evaluation.evaluator import NotShardableError
from neural_mp.tuning.evaluation.plan_evaluator import PlanEvaluation, PlanEvaluator
from neural_mp.tuning.evaluation.sharding import SENDING, STARTING, Shard, ShardingPolicy
from neural_mp.tuning.executors import Executor, WorkerPayload, get_executor_named
from neural_mp.tuning.final_selection import Selection, find_closest_trial, with_figures
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.comparison import measure_stage_noise
from neural_mp.tuning.measurement.objectives import find_best_trial
from neural_mp.util.user_calls import UserCodeError

#: Number of plans that may fail with one error before the run fails with it.
SAME_FAILURE_LIMIT = 3


@dataclass
class _Evaluated:
    """A worker's evaluation of a plan, and the resulting trial."""

    plan: ResolvedPlan
    number: int
    evaluation: PlanEvaluation
    trial: Trial | None = None


@dataclass
class TrialRunner:
    """Tries plans of one run against its FP32 baseline.

    Attributes:
        sharding: decides whether the evaluation of a single plan is sharded.
        measured_alone: numbers of trials measured without parallel trials.
        best: the best trial here that met the target so far, and its model.
    """

    job: TuningJob
    history: History
    log: RunLog
    deadline: Deadline
    plan_evaluator: PlanEvaluator
    sharding: ShardingPolicy
    measured_alone: set[int] = field(default_factory=set)
    best: tuple[Trial, AnyModel] | None = field(default=None, repr=False)
    _failures: dict[str, set[PrecisionPlan]] = field(default_factory=dict)
    _executor: Executor | None = None
    _at_work: bool = False  #: workers start with their first plan

    def run_plans(self, plans: Sequence[ResolvedPlan], ordinal: int) -> Iterator[Trial]:
        """Try plans, the first as the run's `ordinal`-th; yield their trials in order.

        Raises:
            DeadlineExceededError: the time limit passed.
            UserCodeError: the user's code raised.
            TuningError: too many plans failed with the same error.
            NeuralMPError: the model cannot be sent to workers, or their engine cannot be used.
        """
        if self.job.settings.workers.uses_processes and len(plans) > 1:
            yield from self._side_by_side(plans, ordinal)
            return
        for plan in plans:
            yield self._run_alone(plan)

    def stop_workers(self) -> None:
        """Stop the workers, if there are any."""
        if self._executor is not None:
            self._executor.close()
            self._executor, self._at_work = None, False

    def _run_alone(self, plan: ResolvedPlan) -> Trial:
        self.deadline.raise_if_passed()
        number, started = self.history.begin_trial(), time.perf_counter()
        try:
            evaluation, model = self._evaluate_alone(plan, number + 1)
            trial = self._measure_trial(plan, evaluation, model, number)
        except (Exception, KeyboardInterrupt) as error:
            # Even the user's own `sys.exit()` must leave no trial open.
            self._abandon_trial(number, plan, error)
            raise
        self.measured_alone.add(number)
        return self._record_trial(replace(trial, seconds=time.perf_counter() - started))

    def _evaluate_alone(
        self, plan: ResolvedPlan, ordinal: int
    ) -> tuple[PlanEvaluation, AnyModel | None]:
        """Evaluate a plan without parallel trials, here or sharded among all workers."""
        shards = self._plan_shards(plan)
        if shards:
            phase = f"Trial {ordinal}, sharded among {len(shards)} workers"
            self.log.listener.phase(phase, len(shards))
            try:
                return self._evaluate_shards(shards), None
            except (NotShardableError, TuningError) as error:
                self.sharding.give_up(str(error))
        self.log.listener.phase(f"Trial {ordinal}", self.job.evaluator.batch_count)
        return self.log.calls.run_part(lambda: self.plan_evaluator(plan, self.deadline))

    def _plan_shards(self, plan: ResolvedPlan) -> list[Shard]:
        """Return the shards of a plan's evaluation; empty if evaluated here."""
        cost = SENDING if self._at_work else STARTING
        if not self.job.settings.workers.uses_processes or not self.sharding.is_worth_trying(cost):
            return []
        try:
            executor = self._start_executor()
        except NeuralMPError as error:
            # Without workers, a single plan is evaluated here.
            self.sharding.give_up(str(error))
            return []
        return self.sharding.split_evaluation(plan, executor.capacity, executor.threads, cost)

    def _evaluate_shards(self, shards: Sequence[Shard]) -> PlanEvaluation:
        executor, self._at_work = self._start_executor(), True
        results = []
        try:
            tickets = [executor.submit(shard, self.deadline.seconds_left()) for shard in shards]
            for ticket in tickets:
                results.append(executor.assessment(ticket))
                self.log.report_step()
            return self.plan_evaluator.merge_shards(results)
        except BaseException:
            # The other shards are useless now.
            self.stop_workers()
            raise

    def _side_by_side(self, plans: Sequence[ResolvedPlan], ordinal: int) -> Iterator[Trial]:
        results, stopped = self._evaluate_round(plans, ordinal)
        if stopped is not None:
            self.stop_workers()
        # Latency is measured last, when no worker is busy.
        for evaluated in results:
            try:
                trial = evaluated.trial
                if not isinstance(stopped, KeyboardInterrupt):
                    trial = self._finish_trial(evaluated)
            except (KeyboardInterrupt, UserCodeError, NeuralMPError) as error:
                trial, stopped = None, error
            if trial is not None:
                yield self._announce_trial(trial)
            elif evaluated.trial is None and stopped is not None:
                self._abandon_trial(evaluated.number, evaluated.plan, stopped)
        if stopped is not None:
            raise stopped

    def _evaluate_round(
        self, plans: Sequence[ResolvedPlan], ordinal: int
    ) -> tuple[list[_Evaluated], BaseException | None]:
        """Return workers' evaluations of a round, in order, and the exception that ends it, if any.

        Each evaluation is stored on arrival, so that a crash loses none.
        """
        self.deadline.raise_if_passed()
        executor = self._start_executor()
        self.log.listener.phase(f"Trials {ordinal} to {ordinal + len(plans) - 1}", len(plans))
        numbers = {plan: self.history.begin_trial() for plan in plans}
        arrived: dict[ResolvedPlan, _Evaluated] = {}

        def keep_evaluation(plan: ResolvedPlan, evaluation: PlanEvaluation) -> None:
            if plan not in arrived:
                arrived[plan] = _Evaluated(plan, numbers[plan], evaluation)
                self._keep_evaluation(arrived[plan])

        executor.arrived = keep_evaluation
        self._at_work = True
        tickets = [executor.submit(plan, self.deadline.seconds_left()) for plan in plans]
        stopped: BaseException | None = None
        for (plan, number), ticket in zip(numbers.items(), tickets, strict=True):
            try:
                # After the deadline, finished evaluations of other workers are still collected.
                if stopped is None or isinstance(stopped, DeadlineExceededError):
                    evaluation = executor.assessment(ticket)
                    assert isinstance(evaluation, PlanEvaluation)  # plans, not shards
                    keep_evaluation(plan, evaluation)
                    self.log.report_step()
                    self._give_up_on_repeated_failure(arrived[plan].trial)
            except (
                DeadlineExceededError,
                KeyboardInterrupt,
                UserCodeError,
                NeuralMPError,
            ) as error:
                stopped = error
            if stopped is not None and plan not in arrived:
                self._abandon_trial(number, plan, stopped)
        return [arrived[plan] for plan in numbers if plan in arrived], stopped

    def _keep_evaluation(self, evaluated: _Evaluated) -> None:
        """Record an evaluation; without latency to measure, also its trial."""
        if evaluated.evaluation.outcome is Outcome.MET:
            self.history.keep_trial(
                self._build_trial(evaluated.plan, evaluated.evaluation, evaluated.number, {})
            )
        else:
            self._finish_trial(evaluated)

    def _abandon_trial(self, number: int, plan: ResolvedPlan, error: BaseException) -> None:
        self.history.abandon_trial(number, plan.plan, message_of(error) or type(error).__name__)

    def _finish_trial(self, evaluated: _Evaluated) -> Trial:
        """Return the trial of an evaluation, recorded at once."""
        if evaluated.trial is None:
            if evaluated.evaluation.outcome in (Outcome.MET, Outcome.MISSED):
                self.job.evaluator.evaluations += 1
            trial = self._measure_trial(
                evaluated.plan, evaluated.evaluation, None, evaluated.number
            )
            self.history.finish_trial(trial)
            evaluated.trial = trial
        return evaluated.trial

    def _start_executor(self) -> Executor:
        if self._executor is None:
            workers = self.job.settings.workers
            work = WorkerPayload.pack_run(self.job.load, self.plan_evaluator, workers)
            self._executor = get_executor_named(workers.engine)(work, workers, self.log.add_warning)
        return self._executor

    def _measure_trial(
        self, plan: ResolvedPlan, evaluation: PlanEvaluation, model: AnyModel | None, number: int
    ) -> Trial:
        """Return the trial of a plan, with measurements if it met the accuracy target."""
        job, figures = self.job, {}
        if evaluation.outcome is Outcome.MET:
            converted = model or self.plan_evaluator.model.convert_by_plan(plan)
            model = converted
            figures = self.log.calls.run_part(lambda: job.measure_objectives(converted, plan))
        trial = self._build_trial(plan, evaluation, number, figures)
        rivals = [trial] if self.best is None else [self.best[0], trial]
        if model is not None and find_best_trial(rivals, job.objectives) is trial:
            self.best = trial, model
        return trial

    def _build_trial(
        self,
        plan: ResolvedPlan,
        evaluation: PlanEvaluation,
        number: int,
        figures: Mapping[str, float],
    ) -> Trial:
        job = self.job
        loss, bound = (
            None
            if value is None
            else job.settings.criterion.loss(self.plan_evaluator.baseline, value)
            for value in (evaluation.accuracy, evaluation.bound)
        )
        trial = Trial(
            plan.plan,
            evaluation.outcome,
            evaluation.accuracy,
            loss,
            figures,
            evaluation.seconds,
            evaluation.error,
            number,
            evaluation.metrics,
            evaluation.node,
            bound,
        )
        return job.rate_trial(trial, plan)

    def _record_trial(self, trial: Trial) -> Trial:
        self.history.finish_trial(trial)
        self._announce_trial(trial)
        self._give_up_on_repeated_failure(trial)
        return trial

    def _announce_trial(self, trial: Trial) -> Trial:
        self.log.listener.trial(trial, trial.speedup)
        return trial

    def _give_up_on_repeated_failure(self, trial: Trial | None) -> None:
        if trial is None or trial.outcome is not Outcome.FAILED or trial.error is None:
            return
        plans = self._failures.setdefault(trial.error, set())
        plans.add(trial.plan)
        if len(plans) >= SAME_FAILURE_LIMIT:
            raise TuningError(
                f"{len(plans)} different plans failed with the same error: {trial.error}"
            )


_NOT_EVALUATED = "not evaluated before the time limit"
#: Outcomes that training may improve.
_IMPROVABLE = (Outcome.MISSED, Outcome.PRUNED)


def train_closest_plan(
    job: TuningJob,
    model: AnyTunableModel,
    trials: Sequence[Trial],
    baseline: Baseline,
    history: History,
    log: RunLog,
    deadline: Deadline,
) -> tuple[Selection | None, Trial | None]:
    """Train the plan with the least loss, and evaluate and record the result as a trial.

    Returns:
        The selection if the trained plan meets accuracy and speed, else None; and the trial, None
        if nothing was trained.
    """
    improvable = [trial for trial in trials if trial.outcome in _IMPROVABLE]
    # Of equal losses, training goes further from reconstructed weights.
    improvable.sort(
        key=lambda trial: any(config.is_reconstructed for config in trial.plan.configs.values()),
        reverse=True,
    )
    promising = find_closest_trial(improvable)
    if job.train is None or promising is None:
        return None, None
    label = f"the plan of trial {promising.number + 1}"
    # The trial lasted as long as the conversion and evaluation of the plan will last again.
    again = promising.seconds - log.seconds.get("reconstruction", 0.0)
    seconds = deadline.end_time - max(baseline.reserved_seconds, again) - time.monotonic()
    if seconds <= 0:
        log.add_warning(
            f"{label} was not trained: no time was left; set a longer timeout, and resume"
        )
        return None, None
    plan, started, calls = job.space.resolve(promising.plan), time.perf_counter(), log.calls
    number = history.begin_trial()
    try:
        with log.time_phase("train", f"Training {label}"):
            converted = calls.run_part(partial(job.train, model, plan, seconds))
            evaluator, criterion = job.evaluator, job.settings.criterion
            accuracy = calls.run_part(partial(evaluator, converted, deadline, None, model))
        trial = Trial(plan.plan, Outcome.MISSED, number=number, trained=True)
        if math.isfinite(accuracy):
            met = evaluator.spread.meets_target(criterion, baseline.accuracy, accuracy)
            measure = partial(job.measure_objectives, converted, plan)
            figures = calls.run_part(measure) if met else {}
            trial = replace(
                trial,
                outcome=Outcome.MET if met else Outcome.MISSED,
                accuracy=accuracy,
                loss=criterion.loss(baseline.accuracy, accuracy),
                objectives=figures,
                metrics=dict(evaluator.values),
            )
        trial = job.rate_trial(replace(trial, seconds=time.perf_counter() - started), plan)
        noise = partial(measure_stage_noise, job, model, plan, log, converted)
        log.stage_noise = log.run_optional_part(noise, None)
    except UnreturnedCallError as error:
        history.abandon_trial(number, plan.plan, str(error))
        log.warn_of_call(error)
        return None, None
    except DeadlineExceededError:
        history.abandon_trial(number, plan.plan, _NOT_EVALUATED)
        log.add_warning(
            f"{label} was trained, but {_NOT_EVALUATED}; set a longer timeout, and resume"
        )
        return None, None
    except (TrainingError, ConversionError, ConfigurationError) as error:
        history.abandon_trial(number, plan.plan, str(error))
        log.add_warning(f"{label} could not be trained: {error}")
        return None, None
    except (Exception, KeyboardInterrupt) as error:
        history.abandon_trial(number, plan.plan, str(error) or type(error).__name__)
        raise
    history.finish_trial(trial)
    log.listener.trial(trial, trial.speedup)
    change = f"{promising.accuracy:.6g} before and {accuracy:.6g} after training"
    log.add_warning(f"{label} was trained: accuracy {change}")
    return (with_figures(trial, plan, converted) if trial.met else None), trial
