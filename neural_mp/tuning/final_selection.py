"""Final selection: the resulting plan, by a last measurement against FP32, and its reason."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.enums import Objective, is_latency_only
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.profiling import Ratio, estimate_latency_ratio, estimate_uncontended_latency
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.measurement.objectives import (
    find_best_trial,
    make_latency_figures,
)

#: Trials within this ratio of the best are measured again, interleaved, and so many at most.
_FINALIST_RATIO, _FINALISTS = 1.25, 3
#: Limit of the last measurement's rounds while the best plan is uncertain, over a trial's: with
#: more, noise hides less than the interval of the reported speed-up.
_LONGER = 2


@dataclass(frozen=True)
class LatencyComparison:
    """The last latency measurement of the result against FP32.

    Attributes:
        baseline, result: seconds per batch; None for an accelerator, whose speed is not measured.
        ratio: speed-up over FP32; None for the FP32 model itself.
    """

    baseline: float | None
    result: float | None
    ratio: Ratio | None = None

    @property
    def report_figures(self) -> dict[str, Any]:
        """The measurement as fields of a `Report`."""
        return {
            "baseline_latency": self.baseline,
            "latency": self.result,
            "speedup_low": self.ratio.low if self.ratio is not None else None,
            "speedup_high": self.ratio.high if self.ratio is not None else None,
        }


#: The speed on an accelerator, which is not measured.
UNMEASURED = LatencyComparison(None, None)


@dataclass(frozen=True)
class Selection:
    """The result of a run.

    Attributes:
        plan: its resolved plan.
        speed: its latency measurement.
        trial: the trial of the plan; None for the FP32 model.
        slower_than_fp32: trials whose last measurement shows too little gain over FP32.
        remeasured: all trials of the last measurement, with its figures.
    """

    model: AnyModel
    plan: ResolvedPlan
    speed: LatencyComparison
    trial: Trial | None = None
    slower_than_fp32: tuple[Trial, ...] = ()
    remeasured: tuple[Trial, ...] = ()


def compare_latency(baseline: Sequence[float], result: Sequence[float]) -> LatencyComparison:
    """Return the latency comparison of two models timed in interleaved rounds."""
    return LatencyComparison(
        estimate_uncontended_latency(baseline),
        estimate_uncontended_latency(result),
        estimate_latency_ratio(result, baseline).inverse,
    )


def select_fp32(job: TuningJob, slower: Sequence[Trial] = ()) -> Selection:
    """Return the FP32 model as the result, with the trials measured as slower."""
    speed = UNMEASURED
    if job.target is None:
        (seconds,) = job.measurement.measure_rounds([job.model])
        speed = LatencyComparison(
            estimate_uncontended_latency(seconds), estimate_uncontended_latency(seconds)
        )
    slow = tuple(slower)
    return Selection(job.model, job.space.resolve(PrecisionPlan()), speed, None, slow, slow)


def select_plan(
    job: TuningJob,
    trials: Sequence[Trial],
    model: AnyTunableModel,
    measured_alone: Collection[int] = (),
) -> Selection:
    """Return the best plan that met the target, by a new measurement, which is also reported.

    The best plans are measured interleaved with each other and FP32. If latency is the only
    objective and no finalist is faster than FP32 beyond noise, the next ones are measured, at last
    the best of the plans whose gain was uncertain; FP32 is the result when none is left. A single
    finalist is not measured again if its number is in `measured_alone`: its trial was measured in
    this run without parallel trials.
    """
    plans = {t.plan: job.space.resolve(t.plan) for t in trials if t.meets_accuracy}
    lowered = [t for t in trials if t.meets_accuracy and plans[t.plan].has_low_precision]
    waiting = [trial for trial in lowered if trial.met]
    uncertain = [trial for trial in lowered if trial.outcome is Outcome.UNCERTAIN]
    slower: list[Trial] = []
    while waiting or uncertain:
        is_proven, chosen = bool(waiting), _select_finalists(job, waiting or uncertain)
        uncertain = uncertain if is_proven else []
        waiting = [trial for trial in waiting if trial not in chosen]
        first, plan = chosen[0], plans[chosen[0].plan]
        is_final = job.target is not None or first.number in measured_alone
        if len(chosen) == 1 and is_final and job.rate_trial(first, plan).met:
            slow = tuple(slower)
            selection = with_figures(first, plan, model.convert_by_plan(plan))
            return replace(selection, slower_than_fp32=slow, remeasured=(*slow, first))
        models = [job.model, *(model.convert_by_plan(plans[trial.plan]) for trial in chosen)]
        rounds = job.measurement.measure_rounds(models, longer=_LONGER, is_patient=is_proven)
        baseline, *candidates = rounds
        measured = [
            _with_latency(job, trial, plans[trial.plan], baseline, seconds)
            for trial, seconds in zip(chosen, candidates, strict=True)
        ]
        slower += [trial for trial in measured if not trial.met]
        best = find_best_trial(measured, job.objectives)
        if best is not None:
            index = measured.index(best)
            speed = LatencyComparison(
                estimate_uncontended_latency(baseline),
                estimate_uncontended_latency(candidates[index]),
                _format_relative_latency(best).inverse,
            )
            return Selection(
                models[1 + index],
                plans[best.plan],
                speed,
                best,
                tuple(slower),
                (*(trial for trial in slower if trial not in measured), *measured),
            )
    return select_fp32(job, slower)


def _select_finalists(job: TuningJob, waiting: list[Trial]) -> list[Trial]:
    """Return the best trials, best first, as far as noise may have misordered their latencies."""
    if Objective.PERFORMANCE not in job.objectives:
        best = find_best_trial(waiting, job.objectives)
        assert best is not None
        return [best]
    ranked = sorted(waiting, key=lambda t: (t.relative_cost(job.objectives), t.number))
    limit = ranked[0].relative_cost(job.objectives) * _FINALIST_RATIO
    return [t for t in ranked if t.relative_cost(job.objectives) <= limit][:_FINALISTS]


def _with_latency(
    job: TuningJob,
    trial: Trial,
    plan: ResolvedPlan,
    baseline: Sequence[float],
    seconds: Sequence[float],
) -> Trial:
    """Return a trial with its latest figures, and the outcome by these.

    The interval contains the value of the trial: the two measurements are some time apart.
    """
    figures = {
        **trial.objectives,
        **make_latency_figures(baseline, seconds, trial.objectives.get("relative_latency")),
    }
    return job.rate_trial(replace(trial, objectives=figures), plan)


def with_figures(trial: Trial, plan: ResolvedPlan, converted: AnyModel) -> Selection:
    """Return the selection of a converted model with the figures of its trial."""
    if "performance" not in trial.objectives:
        return Selection(converted, plan, UNMEASURED, trial)
    relative, seconds = _format_relative_latency(trial), trial.objectives["performance"]
    speed = LatencyComparison(seconds / relative.value, seconds, relative.inverse)
    return Selection(converted, plan, speed, trial)


def find_best_slow(trials: Sequence[Trial], objectives: Mapping[Objective, float]) -> Trial | None:
    """Return the best trial that meets the accuracy target; None if none was measured."""
    accurate = (
        trial
        for trial in trials
        if trial.meets_accuracy and (trial.speedup or Objective.TARGET in objectives)
    )
    return min(accurate, key=lambda trial: trial.relative_cost(objectives), default=None)


def find_closest_trial(trials: Sequence[Trial]) -> Trial | None:
    """Return the trial with the least loss, preferably one that was evaluated completely."""
    usable = [trial for trial in trials if trial.loss is not None]
    return min(usable, key=lambda t: (t.outcome is Outcome.PRUNED, t.ranking_loss), default=None)


def explain_fp32_result(job: TuningJob, trials: Sequence[Trial], baseline: float | None) -> str:
    """Return the reason for the FP32 model as the result, as text."""
    slow, nearest = find_best_slow(trials, job.objectives), find_closest_trial(trials)
    if slow is not None:
        return f"no plan that meets the target is {format_too_slow(job, slow)}"
    if nearest is None or nearest.accuracy is None or baseline is None:
        return f"{_no_trial_reason(job, trials)}; the result is the {job.source_name} model"
    target = job.settings.criterion.target(baseline)
    if job.evaluator.targets and nearest.metrics:
        return (
            f"no plan met the target of every metric; the result is the {job.source_name} model. "
            f"Closest plan: {nearest.plan!r} with {_missed_metrics(job, nearest)}"
        )
    if job.settings.criterion.met(baseline, nearest.accuracy):
        return (
            f"no plan met the target of {target:.6g} beyond doubt; the result is the "
            f"{job.source_name} model. Closest plan: {nearest.plan!r} with {nearest.accuracy:.6g}; "
            f"{nearest.error}"
        )
    return (
        f"no plan met the target of {target:.6g}; the result is the {job.source_name} model. "
        f"Closest plan: {nearest.plan!r} with {nearest.accuracy:.6g}, "
        f"{abs(nearest.accuracy - target):.3g} short of the target"
        + (" when stopped early" if nearest.outcome is Outcome.PRUNED else "")
    )


def format_too_slow(job: TuningJob, trial: Trial) -> str:
    """Return the end of the sentence that no plan gains enough; `trial` is the best plan."""
    if not is_latency_only(job.objectives):
        names = " and ".join(sorted(job.objectives))
        cost = trial.relative_cost(job.objectives)
        return (
            f"better than {job.source_name} by the objective {names}; the result is the "
            f"{job.source_name} model. Closest plan: {trial.plan!r} at {cost:.3g}× the cost of "
            f"{job.source_name}"
        )
    return (
        f"at least {job.measurement.min_speedup:g} times as fast as {job.source_name} "
        f"(min_speedup) beyond noise on this machine; the result is the {job.source_name} model. "
        f"Closest plan: {trial.plan!r} at {_format_relative_latency(trial).inverse} the speed of "
        f"{job.source_name}"
    )


def _missed_metrics(job: TuningJob, trial: Trial) -> str:
    aggregation, targets = job.evaluator.aggregation, job.evaluator.targets
    return " and ".join(
        f"{name} {value:.6g} (target {targets[name]:.6g})"
        for name, value in trial.metrics.items()
        if not aggregation.get_metric_criterion(name).met(aggregation.baseline[name], value)
    )


def _format_relative_latency(trial: Trial) -> Ratio:
    figures = trial.objectives
    value = figures["relative_latency"]
    low, high = (figures.get(f"relative_latency_{end}", value) for end in ("low", "high"))
    return Ratio(value, low, high)


def _no_trial_reason(job: TuningJob, trials: Sequence[Trial]) -> str:
    if not trials:
        return "no plan was evaluated" + (
            "" if job.space.decision_groups else ": no op supports a lower precision"
        )
    errors = dict.fromkeys(trial.error for trial in trials if trial.error)
    return f"no plan has a finite accuracy: {'; '.join(list(errors)[:3])}"
