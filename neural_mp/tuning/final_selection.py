"""The end of a run: which plan it comes down to, by a measurement beside FP32, and why."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.enums import Objective
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.trial import Outcome, Trial
from neural_mp.profiling import Ratio, ratio, undisturbed
from neural_mp.space import ResolvedPlan
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.objectives import best_trial, finalists, latency_figures

#: Of the plans that met the target, so many are measured side by side at a time.
_FINALISTS = 3
#: How many times as long as a trial is measured.
_LONGER = 4


@dataclass(frozen=True)
class LatencyComparison:
    """What was measured last, of the result beside FP32.

    Attributes:
        baseline, result: seconds a batch.
        ratio: how many times as fast as FP32 the result is; None for the FP32 model itself.
    """

    baseline: float
    result: float
    ratio: Ratio | None = None

    @property
    def figures(self) -> dict[str, Any]:
        """The same by the names that a `Report` has for it."""
        return {
            "baseline_latency": self.baseline,
            "latency": self.result,
            "speedup_low": self.ratio.low if self.ratio is not None else None,
            "speedup_high": self.ratio.high if self.ratio is not None else None,
        }


@dataclass(frozen=True)
class Selection:
    """What a run comes down to.

    Attributes:
        model: the model.
        plan: what it runs in, and what follows.
        speed: what was measured of it.
        trial: the trial of the plan; None for the FP32 model.
        slower_than_fp32: trials that gained too little over FP32 in the last measurement.
        remeasured: all trials that were measured last, with those figures.
    """

    model: AnyModel
    plan: ResolvedPlan
    speed: LatencyComparison
    trial: Trial | None = None
    slower_than_fp32: tuple[Trial, ...] = ()
    remeasured: tuple[Trial, ...] = ()


def compare_latency(baseline: Sequence[float], result: Sequence[float]) -> LatencyComparison:
    """The speed of two models that were timed in turn, round by round."""
    return LatencyComparison(
        undisturbed(baseline), undisturbed(result), ratio(result, baseline).inverse
    )


def fp32_choice(job: TuningJob, turned_out: Sequence[Trial] = ()) -> Selection:
    """The model as it was.

    Args:
        job: the run.
        turned_out: what was measured and turned out to be slower.
    """
    (seconds,) = job.measurement.rounds([job.model])
    speed = LatencyComparison(undisturbed(seconds), undisturbed(seconds))
    slow = tuple(turned_out)
    return Selection(job.model, job.space.resolve(PrecisionPlan()), speed, None, slow, slow)


def select(
    job: TuningJob,
    trials: Sequence[Trial],
    model: AnyTunableModel,
    undisturbed: Collection[int] = (),
) -> Selection:
    """The best plan that met the target, by what is measured now, which is also what is reported.

    The best ones are measured side by side, and beside FP32. Where speed is what is wanted and none
    of them turns out to gain enough over FP32 for sure, it is the turn of the next ones; of FP32
    when none is left. One that is the best beyond doubt is not measured a second time: that would
    only repeat its trial.

    Args:
        job: the run.
        trials: what was tried.
        model: the FP32 model, calibrated.
        undisturbed: the numbers of trials that were measured in this run, with no other beside
            them: their figures are as good as new ones.
    """
    plans = {trial.plan: job.space.resolve(trial.plan) for trial in trials if trial.met}
    waiting = [trial for trial in trials if trial.met and plans[trial.plan].has_low_precision]
    turned_out: list[Trial] = []
    while waiting:
        drawn = _drawn(job, waiting)
        waiting = [trial for trial in waiting if trial not in drawn]
        first, plan = drawn[0], plans[drawn[0].plan]
        if len(drawn) == 1 and first.number in undisturbed and job.judged(first, plan).met:
            slow = tuple(turned_out)
            found = unmeasured(first, plan, model)
            return replace(found, slower_than_fp32=slow, remeasured=(*slow, first))
        models = [job.model, *(model.converted(plans[trial.plan]) for trial in drawn)]
        before, *after = job.measurement.rounds(models, longer=_LONGER)
        measured = [
            _measured(job, trial, plans[trial.plan], before, seconds)
            for trial, seconds in zip(drawn, after, strict=True)
        ]
        turned_out += [trial for trial in measured if not trial.met]
        best = best_trial(measured, job.objectives)
        if best is not None:
            index = measured.index(best)
            speed = compare_latency(before, after[index])
            return Selection(
                models[1 + index],
                plans[best.plan],
                speed,
                best,
                tuple(turned_out),
                (*(trial for trial in turned_out if trial not in measured), *measured),
            )
    return fp32_choice(job, turned_out)


def _drawn(job: TuningJob, waiting: list[Trial]) -> list[Trial]:
    if Objective.PERFORMANCE in job.objectives:
        return finalists(waiting, job.objectives, _FINALISTS)
    best = best_trial(waiting, job.objectives)
    assert best is not None
    return [best]


def _measured(
    job: TuningJob,
    trial: Trial,
    plan: ResolvedPlan,
    before: Sequence[float],
    seconds: Sequence[float],
) -> Trial:
    """A trial with its latest figures, judged by those."""
    figures = {**trial.objectives, **latency_figures(before, seconds)}
    return job.judged(replace(trial, objectives=figures), plan)


def unmeasured(trial: Trial, plan: ResolvedPlan, model: AnyTunableModel) -> Selection:
    """A trial with the figures that it has."""
    found, seconds = _share(trial), trial.objectives["performance"]
    speed = LatencyComparison(seconds / found.value, seconds, found.inverse)
    return Selection(model.converted(plan), plan, speed, trial)


def fastest_slow(trials: Sequence[Trial]) -> Trial | None:
    """Of the trials that meet the target, the fastest; None if none does, or was measured."""
    accurate = (trial for trial in trials if trial.meets_accuracy and trial.speedup)
    return min(accurate, key=lambda trial: trial.objectives["relative_latency"], default=None)


def closest(trials: Sequence[Trial]) -> Trial | None:
    """The trial that lost least; of those evaluated to the end, if there are any."""
    usable = [trial for trial in trials if trial.loss is not None]
    return min(usable, key=lambda t: (t.outcome is Outcome.PRUNED, t.ranking_loss), default=None)


def why_fp32(job: TuningJob, trials: Sequence[Trial], baseline: float | None) -> str:
    """Why a run came down to the FP32 model, in words."""
    slow, near = fastest_slow(trials), closest(trials)
    if slow is not None:
        least = job.measurement.min_speedup
        return (
            f"no plan that meets the target is faster than FP32 on this machine, by a factor of "
            f"{least:g} or more (min_speedup) for sure; the result is the FP32 model. Closest came "
            f"{slow.plan!r} at {_share(slow).inverse} the speed of FP32"
        )
    if near is None or near.accuracy is None or baseline is None:
        return f"{_why_none(job, trials)}; the result is the FP32 model"
    target = job.settings.criterion.target(baseline)
    if job.evaluator.targets and near.metrics:
        return (
            f"no plan met the target of every metric; the result is the FP32 model. Closest came "
            f"{near.plan!r} with {_missed(job, near)}"
        )
    return (
        f"no plan met the target of {target:.6g}; the result is the FP32 model. Closest came "
        f"{near.plan!r} with {near.accuracy:.6g}, {abs(near.accuracy - target):.3g} short of it"
        + (" when its evaluation was stopped" if near.outcome is Outcome.PRUNED else "")
    )


def _missed(job: TuningJob, trial: Trial) -> str:
    """The metrics that missed their targets, with what they had to reach."""
    together, targets = job.evaluator.together, job.evaluator.targets
    return " and ".join(
        f"{name} {value:.6g} (target {targets[name]:.6g})"
        for name, value in trial.metrics.items()
        if not together.criterion_of(name).met(together.baseline[name], value)
    )


def _share(trial: Trial) -> Ratio:
    """The share of FP32's time that a trial takes."""
    figures = trial.objectives
    value = figures["relative_latency"]
    low, high = (figures.get(f"relative_latency_{end}", value) for end in ("low", "high"))
    return Ratio(value, low, high)


def _why_none(job: TuningJob, trials: Sequence[Trial]) -> str:
    """Why no trial has an accuracy that can be compared."""
    if not trials:
        return "no plan was tried" + (
            "" if job.space.decision_groups else ": no op may run in a lower precision"
        )
    errors = dict.fromkeys(trial.error for trial in trials if trial.error)
    return f"no plan has an accuracy that can be compared: {'; '.join(list(errors)[:3])}"
