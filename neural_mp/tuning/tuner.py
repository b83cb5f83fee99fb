"""The loop: a strategy proposes plans; convert, evaluate, record, feed back."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from neural_mp.adaptors.base import Adaptor, Model
from neural_mp.errors import DataError, MetricError, NeuralMPError, TuningError
from neural_mp.observations import Observations
from neural_mp.plan import PrecisionPlan
from neural_mp.precision import Precision
from neural_mp.space import TuningSpace
from neural_mp.strategies.base import Search, Strategy, TuningProblem, fastest_plan
from neural_mp.trial import Outcome, Trial
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.tuning.data import Batches, count_samples, limited
from neural_mp.tuning.evaluator import (
    Deadline,
    Evaluator,
    TimeUpError,
    UserCodeError,
    is_usable,
)
from neural_mp.tuning.history import History
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.objectives import Measurement, best_trial
from neural_mp.tuning.report import Report, count_ops

logger = logging.getLogger(__name__)

#: Different plans that may fail with the same error before the run gives up with it.
SAME_FAILURE_LIMIT = 3


@dataclass(frozen=True)
class TuningJob:
    """What a run needs to know.

    Attributes:
        adaptor, model: the framework and the model it holds.
        space: what every op may run in, user's constraints applied.
        precisions: what the user asked for and this machine supports.
        strategy: proposes plans.
        evaluator: measures accuracy.
        calibration: batches for calibration; None where there are none.
        sampling_size: calibration samples to use.
        criterion, exit_policy, objective, seed: as the user set them.
        open_history: opens the run's record; only called where accuracy is evaluated.
        measurement: how latency and memory are measured.
        warnings: what the user was already warned of.
        seconds: phases already done → how long they took.
    """

    adaptor: Adaptor
    model: Model
    space: TuningSpace
    precisions: tuple[Precision, ...]
    strategy: Strategy
    evaluator: Evaluator
    calibration: Batches | None
    open_history: Callable[[], History]
    measurement: Measurement
    sampling_size: int = 100
    criterion: AccuracyCriterion = AccuracyCriterion()
    exit_policy: ExitPolicy = ExitPolicy()
    objective: str = "performance"
    seed: int = 0
    warnings: tuple[str, ...] = ()
    seconds: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class TuningResult:
    """A usable model, always.

    Attributes:
        model: the best model that met the target; the FP32 one if none did.
        plan: what it runs in.
        met: whether the target was met; None where none could be checked.
        trials: every trial of the run, resumed ones included, oldest first.
        observations: what calibration saw.
        report: the figures.
    """

    model: Model
    plan: PrecisionPlan
    met: bool | None
    trials: tuple[Trial, ...]
    observations: Observations
    report: Report


class Tuner:
    """Runs one job."""

    def __init__(self, job: TuningJob, listener: Listener | None = None) -> None:
        self.job = job
        self.listener = listener or Listener()
        self.warnings = list(job.warnings)
        self.seconds = dict(job.seconds)
        self.deadline = Deadline(job.exit_policy.timeout)
        self.observations = Observations()
        self.baseline: float | None = None
        self.trials: list[Trial] = []
        self._history: History | None = None
        self._failures: dict[str, set[PrecisionPlan]] = {}

    def run(self) -> TuningResult:
        """Tune.

        Raises:
            MetricError: the FP32 model's own accuracy is no number.
            TuningError: every plan fails with the same error.
            Exception: whatever the user's own metric or evaluation function raised, unchanged.
        """
        try:
            if self.job.evaluator.available and not self.job.exit_policy.performance_only:
                return self._tuned()
            return self._converted()
        except UserCodeError as failure:
            raise (failure.__cause__ or failure) from None
        finally:
            self.listener.close()

    def _converted(self) -> TuningResult:
        """Without a way to check accuracy: as much as possible."""
        job = self.job
        self.warnings.append(
            "no accuracy was checked: "
            + (
                "performance_only is set"
                if job.exit_policy.performance_only
                else "give eval_func, or metric and eval_dataloader, to have it checked"
            )
            + "; everything that can run in a lower precision does"
        )
        try:
            self._calibrate()
        except TimeUpError:
            self.warnings.append("the time limit passed during calibration; the model stays FP32")
            return self._result(None, None)
        plan = fastest_plan(self._problem())
        with self._timed("convert"):
            self.listener.phase("Converting")
            model = job.adaptor.convert(job.model, plan, self.observations, job.space)
        return self._result(plan, model)

    def _tuned(self) -> TuningResult:
        self._history = self.job.open_history()
        # Where precisions or constraints changed since, plans that are out of bounds now are left.
        self.trials = [t for t in self._history.trials() if self._fits(t.plan)]
        try:
            self._measure_baseline()
            self._calibrate()
        except TimeUpError:
            self.warnings.append("the time limit passed before the search; the model stays FP32")
            return self._result(None, None)
        with self._timed("search"):
            self._search(self.job.strategy.search(self._problem()))
        best = best_trial(self.trials, self.job.objective)
        if best is None:
            self._explain_miss()
            return self._result(None, None)
        model = self.job.adaptor.convert(
            self.job.model, best.plan, self.observations, self.job.space
        )
        return self._result(best.plan, model, best)

    def _fits(self, plan: PrecisionPlan) -> bool:
        try:
            return self.job.space.resolve(plan) == plan
        except NeuralMPError:
            return False

    def _problem(self) -> TuningProblem:
        job = self.job
        return TuningProblem(job.space, self.observations, job.precisions, job.seed)

    def _measure_baseline(self) -> None:
        job, history = self.job, self._history
        assert history is not None
        if history.baseline is not None:
            self.baseline = history.baseline["accuracy"]
        else:
            with self._timed("baseline"):
                self._evaluation_phase("Evaluating FP32")
                self.baseline = self._evaluate_baseline()
            if not is_usable(self.baseline):
                raise MetricError(
                    f"the accuracy of the FP32 model is {self.baseline}; check the metric, the "
                    f"labels and the model's outputs"
                )
            history.baseline = {"accuracy": self.baseline}
        if self.baseline == 0 and job.criterion.relative:
            self.warnings.append(
                "the FP32 accuracy is 0, of which no share can be lost: the tolerance is taken as "
                "an amount; check that the labels belong to the data"
            )
        self.listener.baseline(self.baseline, job.criterion.target(self.baseline))

    def _evaluate_baseline(self) -> float:
        try:
            return self.job.evaluator(self.job.model, self.deadline)
        except (TimeUpError, UserCodeError, NeuralMPError):
            raise
        except Exception as error:
            # Whatever the framework says of inputs that do not fit.
            raise DataError(
                f"the model does not run on a batch of the evaluation data: "
                f"{type(error).__name__}: {error}"
            ) from error

    def _evaluation_phase(self, name: str) -> None:
        batches = self.job.evaluator.batches
        self.listener.phase(name, (len(batches) or None) if batches is not None else None)

    def _calibrate(self) -> None:
        job = self.job
        if Precision.INT8 not in job.space.precisions() or job.calibration is None:
            return
        if self._history is not None and self._history.observations is not None:
            self.observations = self._history.observations
            return

        def before_each() -> None:
            self.deadline.check()
            self.listener.step()

        with self._timed("calibrate"):
            total = -(-job.sampling_size // max(1, count_samples(job.calibration.first_inputs())))
            known = len(job.calibration)
            self.listener.phase("Calibrating", min(total, known) if known else total)
            batches = limited(job.calibration.inputs(), job.sampling_size, before_each)
            self.observations = job.adaptor.observe(job.model, batches, job.space)
        if self._history is not None:
            self._history.observations = self.observations

    def _search(self, search: Search) -> None:
        """Drive the strategy until it ends, the limits are reached or the user interrupts."""
        tried = {trial.plan: trial for trial in self.trials}
        spent = len(self.trials)
        limit = self.job.exit_policy.max_trials
        try:
            plans = next(search)
            while True:
                results = []
                for given in plans:
                    plan = self.job.space.resolve(given)
                    if plan not in tried:
                        if spent >= limit:
                            self.warnings.append(f"the search stopped at max_trials = {limit}")
                            return
                        tried[plan] = self._try(plan)
                        spent += 1
                    results.append(tried[plan])
                plans = search.send(results)
        except StopIteration:
            return
        except TimeUpError:
            limit_words = f"{self.job.exit_policy.timeout:g} s"
            self.warnings.append(f"the search stopped at the time limit of {limit_words}")
        except KeyboardInterrupt:
            self.warnings.append(
                "the search was interrupted; its trials are kept, and resume goes on from there"
            )

    def _try(self, plan: PrecisionPlan) -> Trial:
        history = self._history
        assert history is not None
        self.deadline.check()
        number = history.start()
        try:
            trial, speedup = self._evaluate(plan, number)
        except (TimeUpError, KeyboardInterrupt, UserCodeError, MetricError) as error:
            history.abandon(number, plan, str(error) or type(error).__name__)
            raise
        history.finish(trial)
        self.trials.append(trial)
        self.listener.trial(trial, speedup)
        self._give_up_on_repeated_failure(trial)
        return trial

    def _evaluate(self, plan: PrecisionPlan, number: int) -> tuple[Trial, float | None]:
        job, started = self.job, time.perf_counter()
        assert self.baseline is not None
        self._evaluation_phase(f"Trial {len(self.trials) + 1}")
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
        objectives, speedup = job.measurement(job.model, model) if met else ({}, None)
        trial = Trial(
            plan,
            Outcome.MET if met else Outcome.MISSED,
            accuracy,
            job.criterion.loss(self.baseline, accuracy),
            objectives,
            time.perf_counter() - started,
            origin,
            number,
        )
        return trial, speedup

    def _origin_of_nan(self, model: Model) -> str:
        """Where NaN or Inf begins in a candidate, if it does and FP32 has none, as a clause."""
        inputs = self.job.measurement.inputs
        if inputs is None:
            return ""
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

    def _explain_miss(self) -> None:
        closest = _closest(self.trials)
        if closest is None or closest.accuracy is None or self.baseline is None:
            self.warnings.append("no plan could be evaluated; the result is the FP32 model")
            return
        target = self.job.criterion.target(self.baseline)
        self.warnings.append(
            f"no plan met the target of {target:.6g}; the result is the FP32 model. Closest came "
            f"{closest.plan!r} with {closest.accuracy:.6g}, {abs(closest.accuracy - target):.3g} "
            f"short of it"
        )

    def _result(
        self, plan: PrecisionPlan | None, model: Model | None, best: Trial | None = None
    ) -> TuningResult:
        job = self.job
        evaluated = self._history is not None
        if model is None or plan is None:
            model, plan = job.model, job.space.fp32_plan()
        latencies: Mapping[str, float] = {}
        with self._timed("measure"):
            self.listener.phase("Measuring latency")
            latencies = job.measurement.latencies(job.model, model)
        report = Report(
            baseline_accuracy=self.baseline,
            accuracy=best.accuracy if best else self.baseline,
            target=job.criterion.target(self.baseline) if self.baseline is not None else None,
            baseline_latency=latencies.get("baseline"),
            latency=latencies.get("candidate"),
            batch_size=job.measurement.batch_size,
            baseline_size=job.adaptor.size(job.model),
            size=job.adaptor.size(model),
            evaluations=job.evaluator.evaluations,
            seconds=self.seconds,
            op_counts=count_ops(job.space.graph, job.space.flow(plan).precisions),
            conversions=job.adaptor.conversion_counts(model),
            best_rejected=_closest(self.trials) if evaluated and best is None else None,
        )
        if report.speedup is not None and report.speedup < 0.95 and best is not None:
            self.warnings.append(
                f"the result runs at {report.speedup:.2f}× the speed of FP32 on this machine"
            )
        report = replace(report, warnings=tuple(self.warnings))
        met = (best is not None) if evaluated else None
        return TuningResult(model, plan, met, tuple(self.trials), self.observations, report)

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started


def _closest(trials: list[Trial]) -> Trial | None:
    """The trial that lost least."""
    usable = [trial for trial in trials if trial.loss is not None]
    return min(usable, key=lambda trial: trial.harm, default=None)
