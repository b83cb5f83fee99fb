"""The loop: a strategy proposes plans; convert, evaluate, record, feed back."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

from neural_mp.adaptors.common.repair import scored_repairs
from neural_mp.adaptors.contract import Model
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.trial import Trial
from neural_mp.errors import DataError, MetricError, NeuralMPError, TuningError
from neural_mp.search.sensitivity import best_repairs, with_repairs
from neural_mp.strategies.base import Search, TuningProblem
from neural_mp.tuning.assessment import Assessor
from neural_mp.core.nested import count_samples
from neural_mp.tuning.batches import limited
from neural_mp.tuning.early_stopping import RunningValues
from neural_mp.tuning.evaluator import (
    Deadline,
    TimeUpError,
    UserCodeError,
    is_usable,
)
from neural_mp.tuning.fidelity import LEAST_DECIBELS, signal_to_noise
from neural_mp.tuning.finish import (
    Choice,
    choose,
    closest,
    compared,
    fastest_slow,
    fp32_choice,
    unmeasured,
    why_fp32,
)
from neural_mp.tuning.history import History
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measuring_probe import LEAST_ALLOWANCE, MeasuringProbe
from neural_mp.tuning.objectives import best_trial
from neural_mp.tuning.report import Report, count_ops, emulated_precisions
from neural_mp.tuning.trial_runner import TrialRunner, judged

#: How the baseline's accuracy came about, in the run's history.
_BASELINE_RUNNING = "baseline running"


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
        self._probe: MeasuringProbe | None = None

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
            return self._left_as_it_is()
        repairs = best_repairs(self.observations)
        plan = job.space.resolve(with_repairs(job.space.fastest_plan(), job.space, repairs))
        with self._timed("convert"):
            self.listener.phase("Converting")
            model = self._converted_to(plan)
        decibels = self._compared_with_fp32(model)
        with self._timed("measure"):
            self.listener.phase("Measuring latency")
            before, after = job.measurement.rounds([job.model, model])
        return self._result(Choice(model, plan, compared(before, after)), decibels)

    def _compared_with_fp32(self, model: Model) -> float | None:
        """How near the outputs are to those of FP32 on calibration samples, in decibels."""
        job = self.job
        if job.calibration is None:
            return None
        with self._timed("compare"):
            self.listener.phase("Comparing with FP32")
            inputs = limited(job.calibration.inputs(), job.sampling_size, self.listener.step)
            decibels = signal_to_noise(job.adaptor, job.model, model, inputs)
        if decibels is not None and decibels < LEAST_DECIBELS:
            self.warnings.append(
                f"the outputs differ from those of FP32: their signal-to-noise ratio is "
                f"{decibels:.1f} dB on calibration samples, less than {LEAST_DECIBELS:g}; give a "
                f"metric and evaluation data, so that only what the accuracy allows is converted"
            )
        return decibels

    def _tuned(self) -> TuningResult:
        self._history = self.job.open_history()
        # Where precisions or constraints changed since, plans that are out of bounds now are left.
        kept = [trial for trial in self._history.trials() if self._fits(trial.plan)]
        self.trials = [judged(trial, self.job) for trial in kept]
        try:
            self._measure_baseline()
            self._calibrate()
        except TimeUpError:
            self.warnings.append("the time limit passed before the search; the model stays FP32")
            return self._left_as_it_is()
        with self._timed("search"):
            self._search(self.job.strategy.search(self._problem()))
        self.seconds["probe"] = self._probe.spent if self._probe is not None else 0.0
        choice = self._chosen()
        if choice.trial is None:
            self.warnings.append(why_fp32(self.job, self.trials, self.baseline))
        return self._result(choice)

    def _chosen(self) -> Choice:
        """What the run comes down to."""
        job = self.job
        self.trials = [self._with_figures(trial) for trial in self.trials]
        self.listener.phase("Measuring the best plans")
        try:
            with self._timed("measure"):
                choice = choose(job, self.trials, self._converted_to)
        except KeyboardInterrupt:
            self.warnings.append("measuring the best plans again was interrupted")
            best = best_trial(self.trials, job.objectives)
            return fp32_choice(job) if best is None else unmeasured(job, best, self._converted_to)
        latest = {trial.number: trial for trial in choice.turned_out}
        self.trials = [latest.get(trial.number, trial) for trial in self.trials]
        return choice

    def _with_figures(self, trial: Trial) -> Trial:
        """A trial of a run that is resumed for something else, with what is wanted now."""
        job = self.job
        if not trial.accurate or math.isfinite(trial.cost(job.objectives)):
            return trial
        figures = job.measurement(job.model, self._converted_to(trial.plan))
        return judged(replace(trial, objectives={**trial.objectives, **figures}), job)

    def _converted_to(self, plan: PrecisionPlan) -> Model:
        job = self.job
        return job.adaptor.convert(job.model, plan, self.observations, job.space)

    def _fits(self, plan: PrecisionPlan) -> bool:
        try:
            return self.job.space.resolve(plan) == plan
        except NeuralMPError:
            return False

    def _problem(self) -> TuningProblem:
        job = self.job
        assert self._history is not None
        allowance = self._allowance(self._history)
        self._probe = MeasuringProbe(job, self.observations, self._history, allowance)
        return TuningProblem(
            job.space, self.observations, job.precisions, job.seed, job.objectives, self._probe
        )

    @staticmethod
    def _allowance(history: History) -> float:
        """Seconds that measuring beside the trials may take: as long as one evaluation."""
        baseline = history.baseline or {}
        return max(LEAST_ALLOWANCE, baseline.get("seconds", 0.0))

    def _measure_baseline(self) -> None:
        job, history = self.job, self._history
        assert history is not None
        if history.baseline is not None:
            self.baseline = history.baseline["accuracy"]
        else:
            with self._timed("baseline"):
                self.listener.phase("Evaluating FP32", job.evaluator.batch_count)
                self.baseline = self._evaluate_baseline()
            if not is_usable(self.baseline):
                raise MetricError(
                    f"the accuracy of the FP32 model is {self.baseline}; check the metric, the "
                    f"labels and the model's outputs"
                )
            history.remember(_BASELINE_RUNNING, job.evaluator.running.to_dict())
            history.baseline = {"accuracy": self.baseline, "seconds": self.seconds["baseline"]}
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

    def _calibrate(self) -> None:
        job = self.job
        if Precision.INT8 not in job.space.usable_precisions or job.calibration is None:
            return
        stored = self._history.observations if self._history is not None else None
        if stored is not None and all(t.name in stored.ranges for t in job.space.tensors):
            self.observations = stored
            return

        def before_each() -> None:
            self.deadline.check()
            self.listener.step()

        with self._timed("calibrate"):
            total = -(-job.sampling_size // max(1, count_samples(job.calibration.first_inputs)))
            known = len(job.calibration)
            self.listener.phase("Calibrating", min(total, known) if known else total)
            batches = limited(job.calibration.inputs(), job.sampling_size, before_each)
            seen = job.adaptor.observe(job.model, batches, job.space)
            self.observations = scored_repairs(job.adaptor, job.model, job.space, seen)
        if self._history is not None:
            self._history.observations = self.observations

    def _search(self, search: Search) -> None:
        """Drive the strategy until it ends, the limits are reached or the user interrupts."""
        tried = {trial.plan: trial for trial in self.trials}
        runner = self._runner()
        limit = self.job.exit_policy.max_trials
        try:
            plans = next(search)
            while True:
                resolved = [self.job.space.resolve(plan) for plan in plans]
                new = [plan for plan in dict.fromkeys(resolved) if plan not in tried]
                room = max(0, limit - len(self.trials))
                for trial in runner.run(new[:room], len(self.trials) + 1):
                    tried[trial.plan] = trial
                    self.trials.append(trial)
                if len(new) > room:
                    self.warnings.append(f"the search stopped at max_trials = {limit}")
                    return
                plans = search.send([tried[plan] for plan in resolved])
        except StopIteration:
            return
        except TimeUpError:
            limit_words = f"{self.job.exit_policy.timeout:g} s"
            self.warnings.append(f"the search stopped at the time limit of {limit_words}")
        except TuningError as error:
            if not any(trial.met for trial in self.trials):
                raise
            self.warnings.append(f"the search stopped: {error}")
        except KeyboardInterrupt:
            self.warnings.append(
                "the search was interrupted; its trials are kept, and resume goes on from there"
            )
        finally:
            runner.close()

    def _runner(self) -> TrialRunner:
        job, history = self.job, self._history
        assert history is not None
        assert self.baseline is not None
        _, kept = history.recall(_BASELINE_RUNNING)
        running = RunningValues.from_dict(kept) if kept else RunningValues()
        assessor = Assessor(
            job.adaptor,
            job.model,
            job.space,
            self.observations,
            job.evaluator,
            job.criterion,
            self.baseline,
            running if job.early_stopping else RunningValues(),
            job.measurement.inputs,
        )
        return TrialRunner(job, history, self.listener, self.deadline, assessor)

    def _left_as_it_is(self) -> TuningResult:
        """The FP32 model, where it did not come to a search."""
        with self._timed("measure"):
            return self._result(fp32_choice(self.job))

    def _result(self, choice: Choice, decibels: float | None = None) -> TuningResult:
        job, trial = self.job, choice.trial
        evaluated = self._history is not None
        effective = job.space.flow(choice.plan).precisions
        rejected = None
        if evaluated and trial is None:
            rejected = fastest_slow(self.trials) or closest(self.trials)
        speed = choice.speed.ratio
        report = Report(
            metric=job.metric,
            higher_is_better=job.criterion.prefers_higher,
            baseline_accuracy=self.baseline,
            accuracy=trial.accuracy if trial else self.baseline,
            target=job.criterion.target(self.baseline) if self.baseline is not None else None,
            decibels=decibels,
            **choice.speed.figures,
            batch_size=job.measurement.batch_size,
            baseline_size=job.adaptor.size(job.model),
            size=job.adaptor.size(choice.model),
            evaluations=job.evaluator.evaluations,
            seconds=self.seconds,
            op_counts=count_ops(job.space.graph, effective),
            emulated=emulated_precisions(job.space, effective),
            conversions=job.adaptor.conversion_counts(choice.model),
            amp=job.amp,
            best_rejected=rejected,
        )
        if speed is not None and speed.high < 1:
            self.warnings.append(f"the result runs at {speed} the speed of FP32 on this machine")
        report = replace(report, warnings=tuple(self.warnings))
        met = (trial is not None) if evaluated else None
        return TuningResult(
            choice.model, choice.plan, met, tuple(self.trials), self.observations, report
        )

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started
