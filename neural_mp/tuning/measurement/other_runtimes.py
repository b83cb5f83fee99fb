"""Choice among runtimes by rounds, and comparison of a result with FP32 in the others.

The source, the runtime of the given model, is kept unless another one certainly gains enough.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.core.criterion import Deadline, DeadlineExceededError
from neural_mp.core.enums import is_latency_only
from neural_mp.core.trial import Outcome, Trial
from neural_mp.profiling import Ratio, estimate_latency_ratio, estimate_uncontended_latency
from neural_mp.runs.report import MetricFigures, RuntimeFigures
from neural_mp.tuning.final_selection import LatencyComparison, Selection
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.objectives import make_latency_figures

#: Speedup over the source, at its lower bound, below which the source is kept.
MIN_RUNTIME_SPEEDUP = 1.05

#: Seconds per batch of each runtime in every interleaved round.
Rounds = Sequence[Sequence[float]]


def select_runtime(rounds: Rounds, source: int | None = 0, current: int | None = None) -> int:
    """Return the index of the fastest runtime whose lower bounds pass; else that of the incumbent.

    The incumbent is the current one if it gains enough over the source, else the source.

    Args:
        rounds: the rounds of each runtime.
        source: index of the source, over which a runtime must gain `MIN_RUNTIME_SPEEDUP`; None if
            it does not take part.
        current: index of a runtime that is left only for one that is certainly faster; None for
            none.
    """
    ranking = _rank_by_latency(rounds)
    gains = current is not None and _gains_enough(rounds, source, current)
    incumbent = current if gains else source
    if incumbent is None:
        return ranking[0]
    return next(
        (
            index
            for index in ranking
            if index != incumbent
            and _gains_enough(rounds, source, index)
            and estimate_latency_ratio(rounds[incumbent], rounds[index]).low > 1
        ),
        incumbent,
    )


def is_certain(rounds: Rounds, source: int | None = 0, current: int | None = None) -> bool:
    """Whether further rounds can hardly change whether the fastest runtime is selected.

    The arguments are those of `select_runtime`.
    """
    fastest = _rank_by_latency(rounds)[0]
    for reference, least in ((source, MIN_RUNTIME_SPEEDUP), (current, 1.0)):
        if reference not in (None, fastest):
            gain = estimate_latency_ratio(rounds[reference], rounds[fastest])
            if gain.low < least <= gain.high:
                return False
    return True


def _rank_by_latency(rounds: Rounds) -> list[int]:
    return sorted(range(len(rounds)), key=lambda index: estimate_uncontended_latency(rounds[index]))


def _gains_enough(rounds: Rounds, source: int | None, index: int) -> bool:
    if source is None or index == source:
        return True
    return estimate_latency_ratio(rounds[source], rounds[index]).low >= MIN_RUNTIME_SPEEDUP


@dataclass(frozen=True)
class Settlement:
    """The result of a run after the comparison with other runtimes.

    Attributes:
        job: the job, with the FP32 model in the runtime of the result.
        accuracy: accuracy of FP32 in another runtime; None if the search is the result.
        metrics: figures of several metrics of FP32 in another runtime.
        rejected: the best trial, if it met the accuracy target and FP32 elsewhere is as fast.
    """

    job: TuningJob
    selection: Selection
    accuracy: float | None = None
    metrics: Mapping[str, MetricFigures] = field(default_factory=dict)
    rejected: Trial | None = None

    def make_recorded_selection(self, job: TuningJob) -> Selection:
        """Return the selection for the record of the searched runtime.

        FP32 in another runtime is recorded as FP32: the record has the ops of one runtime.
        """
        if self.job.model is job.model:
            return self.selection
        plan = job.space.resolve(job.space.fp32_plan())
        return replace(self.selection, model=job.model, plan=plan)


@dataclass(frozen=True)
class _Timed:
    """A model with seconds per batch in each interleaved round."""

    model: AnyModel
    rounds: Sequence[float]

    @property
    def framework(self) -> str:
        return self.model.adaptor.framework

    @property
    def is_source(self) -> bool:
        return self.model.boundary is None

    def speed_over(self, reference: _Timed) -> Ratio:
        """Return the speed relative to another model."""
        return estimate_latency_ratio(reference.rounds, self.rounds)


def settle_runtime(
    job: TuningJob, selection: Selection, baseline: float | None, log: RunLog, deadline: Deadline
) -> Settlement:
    """Return FP32 in another runtime if the selection is not faster, else the selection.

    If latency is the only objective, a plan must be `min_speedup` times as fast as FP32 in every
    runtime. FP32 in another runtime must meet the accuracy target as well, if there is one.
    `baseline` is the accuracy of FP32 in the searched runtime; None without an accuracy check.
    """
    if not job.alternatives:
        return Settlement(job, selection)
    result, fp32, alternatives = _time_runtimes(job, selection, log)
    settlement = Settlement(_with_runtime_speeds(job, result, [fp32, *alternatives]), selection)
    is_tuned = result is not fp32
    if not is_latency_only(job.objectives) or (is_tuned and not job.claims_speed(selection.plan)):
        return settlement
    if is_tuned:
        rivals = _rivals_of_plan(result, alternatives, job.measurement.min_speedup)
        winner = rivals.select_model() if rivals.every else None
    else:
        winner = _Choice([fp32, *alternatives], fp32).select_model()
        winner = None if winner is fp32 else winner
    if winner is None:
        return settlement
    accuracy = None
    if baseline is not None:
        title = f"Evaluating FP32 in {winner.framework}"
        accuracy = measure_accuracy(job, winner.model, log, deadline, "baseline", title)
        criterion = job.settings.criterion
        if accuracy is None or not job.evaluator.spread.meets_target(criterion, baseline, accuracy):
            reason = f"{deadline} passed" if accuracy is None else f"got accuracy {accuracy:.6g}"
            log.add_warning(
                f"FP32 in {winner.framework} is faster than the result, and must meet the accuracy "
                f"target to replace the result; {reason}"
            )
            return settlement
    what = f"the best plan in {result.framework}" if is_tuned else f"FP32 in {result.framework}"
    log.add_warning(
        f"FP32 in {winner.framework} runs at {winner.speed_over(result)} the speed of {what}; the "
        f"result is the FP32 model in {winner.framework}"
    )
    rejected = _mark_as_slow(selection.trial, winner, result)
    moved = _switch_runtime(
        _with_runtime_speeds(job, winner, [fp32, *alternatives]), winner, result
    )
    return Settlement(
        moved,
        _in_fp32(moved, selection, winner, rejected),
        accuracy,
        {} if baseline is None else job.evaluator.metric_figures(job.evaluator.values),
        rejected,
    )


def speeds_over_runtimes(job: TuningJob, selection: Selection, log: RunLog) -> TuningJob:
    """Return the job with the speed of a result over FP32 in every runtime; warn if slower."""
    if not job.alternatives:
        return job
    result, fp32, alternatives = _time_runtimes(job, selection, log)
    for alternative in alternatives:
        speed = result.speed_over(alternative)
        if speed.high < 1:
            log.add_warning(
                f"the result runs at {speed} the speed of FP32 in {alternative.framework}"
            )
    return _with_runtime_speeds(job, result, [fp32, *alternatives])


def _time_runtimes(
    job: TuningJob, selection: Selection, log: RunLog
) -> tuple[_Timed, _Timed, list[_Timed]]:
    """Return the selection, FP32 in its runtime and in the others, timed in interleaved rounds.

    Rounds are added until the choice of `settle_runtime`, if it has one, is certain.
    """
    is_tuned = selection.model is not job.model
    models = [job.model, *job.alternatives, *([selection.model] if is_tuned else [])]

    def is_settled(rounds: Sequence[Sequence[float]]) -> bool:
        if not is_latency_only(job.objectives):
            return True
        fp32, *alternatives = map(_Timed, models, rounds)
        if not is_tuned:
            return _Choice([fp32, *alternatives], fp32).is_certain()
        *alternatives, result = alternatives
        rivals = _rivals_of_plan(result, alternatives, job.measurement.min_speedup)
        return not rivals.every or rivals.is_certain()

    with log.time_phase("measure", "Comparing runtimes"):
        measure = (
            job.measurement.measure_until_decided
            if is_tuned
            else job.measurement.measure_interleaved
        )
        rounds = measure(models, is_settled)
    fp32, *alternatives = map(_Timed, models, rounds)
    return (alternatives.pop() if is_tuned else fp32), fp32, alternatives


def _rivals_of_plan(result: _Timed, alternatives: Sequence[_Timed], min_speedup: float) -> _Choice:
    """Return the choice among FP32 in other runtimes that a plan does not gain enough over."""
    return _Choice([a for a in alternatives if result.speed_over(a).value < min_speedup])


@dataclass(frozen=True)
class _Choice:
    """A choice among models in several runtimes, by `runtime_choice`.

    Attributes:
        every: the models.
        current: the one to keep unless another is certainly faster.
    """

    every: Sequence[_Timed]
    current: _Timed | None = None

    def select_model(self) -> _Timed:
        """Return the selected model."""
        return self.every[select_runtime(self._all_rounds, self._source_index, self._current_index)]

    def is_certain(self) -> bool:
        """Whether further rounds can hardly change the choice."""
        return is_certain(self._all_rounds, self._source_index, self._current_index)

    @property
    def _all_rounds(self) -> list[Sequence[float]]:
        return [timed.rounds for timed in self.every]

    @property
    def _source_index(self) -> int | None:
        return next((index for index, timed in enumerate(self.every) if timed.is_source), None)

    @property
    def _current_index(self) -> int | None:
        return None if self.current is None else self.every.index(self.current)


def measure_accuracy(
    job: TuningJob, model: AnyModel, log: RunLog, deadline: Deadline, phase: str, title: str
) -> float | None:
    """Return the accuracy of a model, in a phase of the log; None if the time limit passed."""
    with log.time_phase(phase, title, job.evaluator.batch_count):
        try:
            return job.evaluator(model, deadline, reference=job.model)
        except DeadlineExceededError:
            return None


def _mark_as_slow(trial: Trial | None, winner: _Timed, result: _Timed) -> Trial | None:
    """Return a trial with its latency relative to FP32 in another runtime, and too slow."""
    if trial is None:
        return None
    figures = {**trial.objectives, **make_latency_figures(winner.rounds, result.rounds)}
    return replace(trial, objectives=figures, outcome=Outcome.SLOW)


def _in_fp32(
    job: TuningJob, selection: Selection, winner: _Timed, rejected: Trial | None
) -> Selection:
    seconds = estimate_uncontended_latency(winner.rounds)
    more = () if rejected is None else (rejected,)
    measured = [trial for trial in selection.remeasured if trial is not selection.trial]
    return Selection(
        winner.model,
        job.space.resolve(job.space.fp32_plan()),
        LatencyComparison(seconds, seconds),
        None,
        (*selection.slower_than_fp32, *more),
        (*measured, *more),
    )


def _switch_runtime(job: TuningJob, winner: _Timed, previous: _Timed) -> TuningJob:
    """Return the job with the FP32 model of another runtime than that of the result before."""
    space = winner.model.whole_space(job.description.hardware)
    space = space.restricted_to(job.settings.precisions)
    speed = winner.speed_over(previous)
    reasons = {
        winner.framework: f"FP32 runs at {speed} the speed of the result in {previous.framework}",
        previous.framework: f"not faster than FP32 in {winner.framework}",
    }
    figures = tuple(
        replace(
            runtime,
            chosen=runtime.framework == winner.framework,
            reason=reasons.get(runtime.framework, runtime.reason),
        )
        for runtime in job.runtimes
    )
    return replace(job, model=winner.model.in_space(space), runtimes=figures)


def _with_runtime_speeds(job: TuningJob, result: _Timed, references: Sequence[_Timed]) -> TuningJob:
    speeds = {r.framework: result.speed_over(r) for r in references if r is not result}

    def with_speed(runtime: RuntimeFigures) -> RuntimeFigures:
        speed = speeds.get(runtime.framework)
        if speed is None:
            return runtime
        return replace(
            runtime,
            result_speedup=speed.value,
            result_speedup_low=speed.low,
            result_speedup_high=speed.high,
        )

    return replace(job, runtimes=tuple(map(with_speed, job.runtimes)))
