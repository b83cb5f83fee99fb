"""Training of the most promising plan if no plan meets the target."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from neural_mp.adaptors.loaded_model import AnyTunableModel
from neural_mp.core.deadline import Deadline, DeadlineExceededError
from neural_mp.core.trial import Outcome, Trial
from neural_mp.errors import ConfigurationError, ConversionError, TrainingError
from neural_mp.runs.history import History
from neural_mp.tuning.baseline import Baseline
from neural_mp.tuning.evaluation.metric_values import is_usable
from neural_mp.tuning.final_selection import Selection, closest, with_figures
from neural_mp.tuning.job import TuningJob
from neural_mp.tuning.listener import RunLog
from neural_mp.tuning.measurement.stage_noise import stage_noise

_NOT_EVALUATED = "not evaluated before the time limit"
#: Outcomes that training may improve.
_IMPROVABLE = (Outcome.MISSED, Outcome.PRUNED)


def _is_reconstructed(trial: Trial) -> bool:
    return any(config.is_reconstructed for config in trial.plan.configs.values())


def trained_selection(
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
    promising = closest(sorted(improvable, key=_is_reconstructed, reverse=True))
    if job.train is None or promising is None:
        return None, None
    label = f"the plan of trial {promising.number + 1}"
    # The trial lasted as long as the conversion and evaluation of the plan will last again.
    again = promising.seconds - log.seconds.get("reconstruction", 0.0)
    seconds = deadline.end - max(baseline.reserve, again) - time.monotonic()
    if seconds <= 0:
        log.warn(f"{label} was not trained: no time was left; set a longer timeout, and resume")
        return None, None
    plan, started = job.space.resolve(promising.plan), time.perf_counter()
    number = history.start()
    try:
        with log.phase("train", f"Training {label}"):
            converted = job.train(model, plan, seconds)
            evaluator, criterion = job.evaluator, job.settings.criterion
            accuracy = evaluator(converted, deadline, None, model)
        trial = Trial(plan.plan, Outcome.MISSED, number=number, trained=True)
        if is_usable(accuracy):
            met = evaluator.spread.met(criterion, baseline.accuracy, accuracy)
            figures = job.figures(converted, plan) if met else {}
            trial = replace(
                trial,
                outcome=Outcome.MET if met else Outcome.MISSED,
                accuracy=accuracy,
                loss=criterion.loss(baseline.accuracy, accuracy),
                objectives=figures,
                metrics=dict(evaluator.values),
            )
        trial = job.rated(replace(trial, seconds=time.perf_counter() - started), plan)
        log.stage_noise = stage_noise(job, model, plan, log, converted)
    except DeadlineExceededError:
        history.abandon(number, plan.plan, _NOT_EVALUATED)
        log.warn(f"{label} was trained, but {_NOT_EVALUATED}; set a longer timeout, and resume")
        return None, None
    except (TrainingError, ConversionError, ConfigurationError) as error:
        history.abandon(number, plan.plan, str(error))
        log.warn(f"{label} could not be trained: {error}")
        return None, None
    except (Exception, KeyboardInterrupt) as error:
        history.abandon(number, plan.plan, str(error) or type(error).__name__)
        raise
    history.finish(trial)
    log.listener.trial(trial, trial.speedup)
    change = f"{promising.accuracy:.6g} before and {accuracy:.6g} after training"
    log.warn(f"{label} was trained: accuracy {change}")
    return (with_figures(trial, plan, converted) if trial.met else None), trial
