"""What measures the accuracy: its name, and whether its larger or its smaller value is better."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from neural_mp.api.loading import EvalFunc, WeightedMetrics
from neural_mp.config import MetricSettings
from neural_mp.errors import ConfigurationError
from neural_mp.tuning.criterion import AccuracyCriterion

#: Words of a name that make the direction doubtful: what bears them may well be an error.
_ERROR_WORDS = frozenset({"err", "rms", "wer", "cer", "eer", "nll", "bce", "ppl"})
#: The same, for the end of a word too: `logloss`, `nrmse`, `crossentropy`.
_ERROR_ENDINGS = (
    *("loss", "losses", "error", "errors", "mse", "mae", "mape", "msle"),
    *("entropy", "perplexity", "deviance", "divergence"),
)
#: `MyRMSELoss2` is `My`, `RMSE`, `Loss`; `val_loss` is `val`, `loss`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class _Measure:
    """A metric or evaluation function.

    Attributes:
        name: what it is called in messages.
        said: its own `higher_is_better`; None where it does not say.
        aliases: every name it goes by.
    """

    name: str
    said: bool | None
    aliases: tuple[str, ...]

    @property
    def doubtful_name(self) -> str | None:
        """The name by which the smaller value may be the better one; None where it says itself."""
        doubtful = (alias for alias in self.aliases if _may_be_an_error(alias))
        return next(doubtful, None) if self.said is None else None

    def __str__(self) -> str:
        if self.said is None:
            return f"{self.name} does not say, which counts as higher is better"
        return f"{self.name} says that {_words(self.said)}"


def directed(
    criterion: AccuracyCriterion,
    metrics: WeightedMetrics,
    eval_func: EvalFunc | None,
    configured: Sequence[MetricSettings] = (),
) -> AccuracyCriterion:
    """The criterion with a direction: the user's, else the metric's own, else higher is better.

    Args:
        criterion: as the user set it.
        metrics: with their weights.
        eval_func: measures in place of the metrics where it is given.
        configured: the same metrics as YAML names them; empty where Python set them.

    Raises:
        ConfigurationError: criterion and metric, or two metrics, contradict each other; or the
            direction is not known, as nobody says it and the metric may be an error.
    """
    measures = _measures(metrics, eval_func, configured)
    said = {measure.said for measure in measures if measure.said is not None}
    if len(said) > 1:
        raise _disagreement(measures)
    wanted = criterion.higher_is_better
    if wanted is not None:
        if said and wanted not in said:
            raise _contradiction(wanted, measures)
        return criterion
    for measure in measures:
        if measure.doubtful_name is not None:
            raise ConfigurationError(
                f"the direction of {measure.name} is not known: the name {measure.doubtful_name} "
                f"may stand for an error, of which less is better; set higher_is_better to False "
                f"(or True) in accuracy_criterion, or give {measure.name} an attribute "
                f"higher_is_better"
            )
    directions = {measure.said is not False for measure in measures} or {True}
    if len(directions) > 1:
        raise _disagreement(measures)
    return replace(criterion, higher_is_better=directions.pop())


def metric_label(metrics: WeightedMetrics, eval_func: EvalFunc | None) -> str:
    """What measures the accuracy, as a table shows it: `RMSE`, `0.5·F1 + 0.5·AUC`."""
    if eval_func is not None:
        return _name(eval_func)
    return " + ".join(
        _name(metric) if weight == 1 else f"{weight:.3g}·{_name(metric)}"
        for metric, weight in metrics
    )


def _measures(
    metrics: WeightedMetrics, eval_func: EvalFunc | None, configured: Sequence[MetricSettings]
) -> list[_Measure]:
    """All that has a part in the accuracy."""
    if eval_func is not None:
        return [_measure(eval_func)]
    # A function in YAML may make an object of a class whose name tells less than its own.
    names = [item.name.rpartition(":")[2] for item in configured] or [""] * len(metrics)
    pairs = zip(metrics, names, strict=True)
    return [_measure(metric, name) for (metric, weight), name in pairs if weight]


def _measure(subject: Any, *names: str) -> _Measure:
    own = _unwrapped(subject)
    kinds = [kind.__name__ for kind in type(own[-1]).__mro__]
    return _Measure(_name(subject), _said(own), (_name(subject), *kinds, *names))


def _may_be_an_error(name: str) -> bool:
    words = [word.lower() for word in _WORD.findall(name)]
    return any(word in _ERROR_WORDS or word.endswith(_ERROR_ENDINGS) for word in words)


def _said(subjects: Sequence[Any]) -> bool | None:
    """The `higher_is_better` of the first that has one; None as its value is no answer."""
    for subject in subjects:
        value = getattr(subject, "higher_is_better", None)
        if isinstance(value, bool | np.bool_):
            return bool(value)
        if value is not None:
            raise ConfigurationError(
                f"higher_is_better of {_name(subject)} must be True or False, got {value!r}"
            )
    return None


def _unwrapped(subject: Any) -> list[Any]:
    """It, and the function inside if arguments were bound to it."""
    found = [subject]
    while isinstance(found[-1], partial):
        found.append(found[-1].func)
    return found


def _name(subject: Any) -> str:
    inner = _unwrapped(subject)[-1]
    name = str(getattr(inner, "__name__", type(inner).__name__))
    return "eval_func" if name == "<lambda>" else name


def _words(higher: bool) -> str:
    return f"{'higher' if higher else 'lower'} is better"


def _contradiction(wanted: bool, measures: Sequence[_Measure]) -> ConfigurationError:
    said = "; ".join(str(measure) for measure in measures if measure.said is not None)
    return ConfigurationError(
        f"{said}, but accuracy_criterion has higher_is_better: {wanted}; leave higher_is_better "
        f"out of accuracy_criterion to take the metric's own direction"
    )


def _disagreement(measures: Sequence[_Measure]) -> ConfigurationError:
    return ConfigurationError(
        f"the metrics go in different directions, so a sum of them says nothing: "
        f"{'; '.join(map(str, measures))}; keep metrics of one direction, or give those that "
        f"do not say an attribute higher_is_better"
    )
