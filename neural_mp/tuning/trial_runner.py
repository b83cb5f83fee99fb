"""Plans tried: evaluated, measured, recorded; one by one or side by side."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import MetricError, NeuralMPError, TuningError
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.assessment import Assessment, Assessor
from neural_mp.tuning.evaluator import Deadline, TimeUpError, UserCodeError
from neural_mp.tuning.history import History
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.workers import WorkerPool

#: Different plans that may fail with the same error before the run gives up with it.
SAME_FAILURE_LIMIT = 3


@dataclass
class TrialRunner:
    """Tries plans of one run against its FP32 baseline.

    Attributes:
        undisturbed: the numbers of trials that were measured with no other trial beside them.
    """

    job: TuningJob
    history: History
    listener: Listener
    deadline: Deadline
    assessor: Assessor
    undisturbed: set[int] = field(default_factory=set)
    _failures: dict[str, set[PrecisionPlan]] = field(default_factory=dict)
    _pool: WorkerPool | None = None

    def run(self, plans: Sequence[ResolvedPlan], ordinal: int) -> Iterator[Trial]:
        """Try plans, the first of which is the run's `ordinal`-th; trials come in their order.

        Raises:
            TimeUpError: the time limit passed meanwhile.
            UserCodeError: the user's own code raised.
            TuningError: this was one failure of the same kind too many.
            ConfigurationError: there are to be workers, and the model cannot be sent to them.
        """
        if self.job.settings.workers > 1 and len(plans) > 1:
            yield from self._side_by_side(plans, ordinal)
            return
        for number, plan in enumerate(plans, start=ordinal):
            yield self._alone(plan, number)

    def close(self) -> None:
        """End the workers, if there are any."""
        if self._pool is not None:
            self._pool.close()

    def _alone(self, plan: ResolvedPlan, ordinal: int) -> Trial:
        self.deadline.check()
        self.listener.phase(f"Trial {ordinal}", self.job.evaluator.batch_count)
        number, started = self.history.start(), time.perf_counter()
        try:
            assessment, model = self.assessor(plan, self.deadline)
            trial = self._measured(plan, assessment, model, number)
        except (TimeUpError, KeyboardInterrupt, UserCodeError, MetricError) as error:
            self.history.abandon(number, plan.plan, str(error) or type(error).__name__)
            raise
        self.undisturbed.add(number)
        return self._recorded(replace(trial, seconds=time.perf_counter() - started))

    def _side_by_side(self, plans: Sequence[ResolvedPlan], ordinal: int) -> Iterator[Trial]:
        self.deadline.check()
        if self._pool is None:
            self._pool = WorkerPool(self.job.load, self.assessor, self.job.settings.workers)
        self.listener.phase(f"Trials {ordinal} to {ordinal + len(plans) - 1}", len(plans))
        waiting = [(plan, self.history.start()) for plan in plans]
        futures = [self._pool.submit(plan, self.deadline.left()) for plan in plans]
        stopped: BaseException | None = None
        for (plan, number), future in zip(waiting, futures, strict=True):
            if stopped is not None and not isinstance(stopped, TimeUpError):
                self.history.abandon(number, plan.plan, str(stopped) or type(stopped).__name__)
                continue
            try:
                assessment = self._pool.result(future)
                if assessment.outcome in (Outcome.MET, Outcome.MISSED):
                    self.job.evaluator.evaluations += 1
                trial = self._measured(plan, assessment, None, number)
            except (TimeUpError, KeyboardInterrupt, UserCodeError, NeuralMPError) as error:
                # When the time is up, what others have found by then is not thrown away.
                self.history.abandon(number, plan.plan, str(error) or type(error).__name__)
                stopped = error
                continue
            self.listener.step()
            try:
                yield self._recorded(trial)
            except TuningError as error:
                stopped = error
        if stopped is not None:
            raise stopped

    def _measured(
        self, plan: ResolvedPlan, assessment: Assessment, model: AnyModel | None, number: int
    ) -> Trial:
        """The trial of a plan; of one that met the target, with what it takes."""
        job, figures = self.job, {}
        if assessment.outcome is Outcome.MET:
            if model is None:
                model = self.assessor.model.converted(plan)
            figures = job.figures(model, plan)
        loss = None
        if assessment.accuracy is not None:
            loss = job.settings.criterion.loss(self.assessor.baseline, assessment.accuracy)
        trial = Trial(
            plan.plan,
            assessment.outcome,
            assessment.accuracy,
            loss,
            figures,
            assessment.seconds,
            assessment.error,
            number,
            assessment.metrics,
        )
        return job.judged(trial, plan)

    def _recorded(self, trial: Trial) -> Trial:
        self.history.finish(trial)
        self.listener.trial(trial, trial.speedup)
        self._give_up_on_repeated_failure(trial)
        return trial

    def _give_up_on_repeated_failure(self, trial: Trial) -> None:
        if trial.outcome is not Outcome.FAILED or trial.error is None:
            return
        plans = self._failures.setdefault(trial.error, set())
        plans.add(trial.plan)
        if len(plans) >= SAME_FAILURE_LIMIT:
            raise TuningError(
                f"{len(plans)} different plans failed with the same error: {trial.error}"
            )
