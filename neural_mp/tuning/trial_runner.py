"""One plan tried: convert, evaluate, measure, record."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass, field

from neural_mp.adaptors.base import Model
from neural_mp.errors import MetricError, TuningError
from neural_mp.observations import Observations
from neural_mp.plan import PrecisionPlan
from neural_mp.trial import Outcome, Trial
from neural_mp.tuning.evaluator import Deadline, TimeUpError, UserCodeError, is_usable
from neural_mp.tuning.history import History
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.objectives import is_slow

logger = logging.getLogger(__name__)

#: Different plans that may fail with the same error before the run gives up with it.
SAME_FAILURE_LIMIT = 3


@dataclass
class TrialRunner:
    """Tries plans of one run against its FP32 baseline."""

    job: TuningJob
    history: History
    listener: Listener
    deadline: Deadline
    baseline: float
    observations: Observations
    _failures: dict[str, set[PrecisionPlan]] = field(default_factory=dict)

    def __call__(self, plan: PrecisionPlan, ordinal: int) -> Trial:
        """Try a plan, the run's `ordinal`-th.

        Raises:
            TimeUpError: the time limit passed meanwhile.
            UserCodeError: the user's own code raised.
            TuningError: this was one failure of the same kind too many.
        """
        history = self.history
        self.deadline.check()
        number = history.start()
        try:
            trial, speedup = self._evaluate(plan, number, ordinal)
        except (TimeUpError, KeyboardInterrupt, UserCodeError, MetricError) as error:
            history.abandon(number, plan, str(error) or type(error).__name__)
            raise
        history.finish(trial)
        self.listener.trial(trial, speedup)
        self._give_up_on_repeated_failure(trial)
        return trial

    def _evaluate(
        self, plan: PrecisionPlan, number: int, ordinal: int
    ) -> tuple[Trial, float | None]:
        job, started = self.job, time.perf_counter()
        self.listener.phase(f"Trial {ordinal}", job.evaluator.batch_count)
        try:
            model = job.adaptor.convert(job.model, plan, self.observations, job.space)
            accuracy = job.evaluator(model, self.deadline)
        except (TimeUpError, UserCodeError, MetricError):
            raise
        except Exception as error:
            # Whatever a framework raises: one plan that fails must not end the search.
            logger.debug("a plan failed", exc_info=True)
            words = f"{type(error).__name__}: {error}"
            seconds = time.perf_counter() - started
            return Trial(plan, Outcome.FAILED, error=words, seconds=seconds, number=number), None
        if not is_usable(accuracy):
            words = f"the accuracy is {accuracy}{self._origin_of_nan(model)}"
            return Trial(plan, Outcome.MISSED, error=words, number=number), None
        met = job.criterion.met(self.baseline, accuracy)
        origin = None if met else self._origin_of_nan(model).removeprefix("; ") or None
        figures, speedup = job.measurement(job.model, model) if met else ({}, None)
        slow = met and not self._costs_are_known(plan) and is_slow(job.objectives, figures)
        trial = Trial(
            plan,
            Outcome.SLOW if slow else Outcome.MET if met else Outcome.MISSED,
            accuracy,
            job.criterion.loss(self.baseline, accuracy),
            figures,
            time.perf_counter() - started,
            origin,
            number,
        )
        return trial, speedup

    def _costs_are_known(self, plan: PrecisionPlan) -> bool:
        """Whether some op runs in a precision that gains no speed here, or that was forced."""
        space, forced = self.job.space, self.job.forced
        return any(
            precision in forced or precision in space.capabilities[op].emulated
            for op, precision in space.flow(plan).precisions.items()
        )

    def _origin_of_nan(self, model: Model) -> str:
        """Where NaN or Inf begins in a candidate, if it does and FP32 has none, as a clause."""
        inputs = self.job.measurement.inputs
        op = self.job.adaptor.first_non_finite(model, inputs)
        if op is None or self.job.adaptor.first_non_finite(self.job.model, inputs) is not None:
            return ""
        return f"; NaN or Inf begins at op {op!r}"

    def _give_up_on_repeated_failure(self, trial: Trial) -> None:
        if trial.outcome is not Outcome.FAILED or trial.error is None:
            return
        plans = self._failures.setdefault(trial.error, set())
        plans.add(trial.plan)
        if len(plans) >= SAME_FAILURE_LIMIT:
            raise TuningError(
                f"{len(plans)} different plans failed with the same error: {trial.error}"
            )
