"""Name and direction (higher or lower is better) of the accuracy metric."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from neural_mp.api.user_metrics import EvalFunc, MetricSet, WeightedMetrics
from neural_mp.config import MetricSettings
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import ConfigurationError
from neural_mp.metrics import METRICS
from neural_mp.metrics.coercion import metric_name, unwrapped
from neural_mp.tuning.evaluation.metric_values import MetricAggregation

#: Words in a name that make the direction doubtful: the metric may be an error.
_ERROR_WORDS = frozenset({"err", "rms", "wer", "cer", "eer", "nll", "bce", "ppl"})
#: Likewise, also as endings of words: `logloss`, `nrmse`, `crossentropy`.
_ERROR_ENDINGS = (
    "loss",
    "losses",
    "error",
    "errors",
    "mse",
    "mae",
    "mape",
    "msle",
    "entropy",
    "perplexity",
    "deviance",
    "divergence",
)
#: Splits `MyRMSELoss2` into `My`, `RMSE`, `Loss`; `val_loss` into `val`, `loss`.
_WORD = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")


@dataclass(frozen=True)
class _Measure:
    """Direction of a metric or evaluation function.

    Attributes:
        name: name in messages.
        said: the metric's own `higher_is_better`; None if undeclared.
        aliases: all names, the names of base classes included.
    """

    name: str
    said: bool | None
    aliases: tuple[str, ...]

    @property
    def doubtful_name(self) -> str | None:
        """The alias that suggests an error metric, if no direction is declared; else None."""
        doubtful = (alias for alias in self.aliases if _may_be_an_error(alias))
        return next(doubtful, None) if self.said is None else None

    def __str__(self) -> str:
        if self.said is None:
            return f"{self.name} has no direction, so higher is better"
        return f"{self.name}: {_words(self.said)}"


def directed(
    criterion: AccuracyCriterion,
    metrics: WeightedMetrics,
    eval_func: EvalFunc | None,
    configured: Sequence[MetricSettings] = (),
) -> AccuracyCriterion:
    """Return the criterion with a direction: the user's, else the metric's, else higher is better.

    Args:
        criterion: criterion set by the user.
        metrics: metrics with their weights.
        eval_func: replaces the metrics if set.
        configured: the metrics as named in YAML; empty if set in Python.

    Raises:
        ConfigurationError: criterion and metrics contradict each other, or the direction is
            undeclared and the name suggests an error.
    """
    measures = _measures(metrics, eval_func, configured)
    if eval_func is None and isinstance(metrics, MetricSet) and metrics.every:
        return replace(criterion, higher_is_better=True)  # direction of the score: see `together`
    declared = {measure.said for measure in measures if measure.said is not None}
    if len(declared) > 1:
        raise _disagreement(measures)
    chosen = criterion.higher_is_better
    if chosen is not None:
        if declared and chosen not in declared:
            raise _contradiction(chosen, measures)
        return criterion
    for measure in measures:
        if measure.doubtful_name is not None:
            raise _doubt(measure)
    directions = {measure.said is not False for measure in measures} or {True}
    if len(directions) > 1:
        raise _disagreement(measures)
    return replace(criterion, higher_is_better=directions.pop())


def metric_label(metrics: WeightedMetrics, eval_func: EvalFunc | None) -> str:
    """Return the name of the metric for tables: `RMSE`, `0.5·F1 + 0.5·AUC`."""
    if eval_func is not None:
        return _name(eval_func)
    names = [_name(metric) for metric, _ in metrics]
    if isinstance(metrics, MetricSet) and (metrics.every or len(metrics) == 1):
        return ", ".join(metrics.names)
    return " + ".join(
        name if weight == 1 else f"{weight:.3g}·{name}"
        for name, (_, weight) in zip(names, metrics, strict=True)
    )


def together(metrics: MetricSet, criterion: AccuracyCriterion) -> MetricAggregation:
    """Return the aggregation of several metrics to one number.

    Args:
        metrics: the metrics with the directions set by the user.
        criterion: criterion set by the user; its direction applies to metrics without their own.

    Raises:
        ConfigurationError: a direction contradicts the metric's own; or every metric has to meet
            the target and a direction is unknown.
    """
    default = criterion.higher_is_better
    higher: dict[str, bool] = {}
    for name, chosen, (metric, _) in zip(metrics.names, metrics.said, metrics, strict=True):
        measure = replace(_measure(metric, name), name=name)
        if chosen is not None and measure.said is not None and chosen != measure.said:
            raise ConfigurationError(
                f"{measure}, but higher_is_better is {chosen}; remove higher_is_better"
            )
        stated = next((flag for flag in (chosen, measure.said, default) if flag is not None), None)
        if stated is None and measure.doubtful_name is not None and metrics.every:
            raise _doubt(measure)
        higher[name] = stated is not False
    return MetricAggregation(
        metrics.names, metrics.every, criterion, higher, partial(_by_name, default)
    )


def _by_name(default: bool | None, name: str) -> bool:
    """Whether higher is better for a value that a user's metric returns under this name."""
    registered = METRICS.find(name) if ":" not in name and name in METRICS else None
    declared = _said([registered]) if registered is not None else None
    measure = _Measure(name, declared if declared is not None else default, (name,))
    if measure.doubtful_name is not None:
        raise _doubt(measure)
    return measure.said is not False


def _measures(
    metrics: WeightedMetrics, eval_func: EvalFunc | None, configured: Sequence[MetricSettings]
) -> list[_Measure]:
    """Return all metrics and functions that contribute to the accuracy."""
    if eval_func is not None:
        return [_measure(eval_func)]
    # A YAML name may be a factory whose name reveals more than the class of the metric.
    names = [item.name.rpartition(":")[2] for item in configured] or [""] * len(metrics)
    pairs = zip(metrics, names, strict=True)
    return [_measure(metric, name) for (metric, weight), name in pairs if weight]


def _measure(subject: object, *names: str) -> _Measure:
    own = unwrapped(subject)
    kinds = [kind.__name__ for kind in type(own[-1]).__mro__]
    return _Measure(_name(subject), _said(own), (_name(subject), *kinds, *names))


def _may_be_an_error(name: str) -> bool:
    parts = [part.lower() for part in _WORD.findall(name)]
    return any(part in _ERROR_WORDS or part.endswith(_ERROR_ENDINGS) for part in parts)


def _said(subjects: Sequence[Any]) -> bool | None:
    """Return the first `higher_is_better` that is set; None if undeclared."""
    for subject in subjects:
        value = getattr(subject, "higher_is_better", None)
        if isinstance(value, bool | np.bool_):
            return bool(value)
        if value is not None:
            raise ConfigurationError(
                f"higher_is_better of {_name(subject)} must be True or False, got {value!r}"
            )
    return None


def _name(subject: object) -> str:
    name = metric_name(subject)
    return "eval_func" if name == "<lambda>" else name


def _doubt(measure: _Measure) -> ConfigurationError:
    return ConfigurationError(
        f"the direction of {measure.name} is not known: {measure.doubtful_name} may be an error, "
        f"for which lower is better; set higher_is_better to False (or True) in "
        f"accuracy_criterion, or give {measure.name} an attribute higher_is_better"
    )


def _words(higher: bool) -> str:
    return f"{'higher' if higher else 'lower'} is better"


def _contradiction(chosen: bool, measures: Sequence[_Measure]) -> ConfigurationError:
    stated = "; ".join(str(measure) for measure in measures if measure.said is not None)
    return ConfigurationError(
        f"{stated}, but accuracy_criterion has higher_is_better: {chosen}; remove higher_is_better "
        f"from accuracy_criterion to use the metric's own direction"
    )


def _disagreement(measures: Sequence[_Measure]) -> ConfigurationError:
    return ConfigurationError(
        f"metrics of a sum must have one direction, got {'; '.join(map(str, measures))}; keep "
        f"metrics of one direction, or set their attribute higher_is_better"
    )
