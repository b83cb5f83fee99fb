"""Conversion of user-defined metrics and metric names to `Metric`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from neural_mp.common import Metric, missing_methods
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, MetricError, did_you_mean, error_path
from neural_mp.metrics.base import METRICS
from neural_mp.metrics.function_metric import OverAllData, takes_data
from neural_mp.metrics.predictions import OfOutput
from neural_mp.metrics.third_party import (
    Scorer,
    foreign,
    is_scorer,
    is_sklearn_function,
    named_scorer,
    scorer_names,
    sklearn_function,
)
from neural_mp.util.text import with_article

#: Options common to all metrics: the selected output, labels and value.
CHOICES = ("output", "label", "value")
_METHODS = ("update", "reset", "result")


def build_metric(
    name: str, options: Mapping[str, Any] | int | None = None, metrics: Registry = METRICS
) -> Metric:
    """Build the metric of a name.

    Args:
        name: a registered metric; a scorer of scikit-learn, e.g. `f1_macro`; or a user-defined
            `module:attribute`: a function of predictions and labels, or a class or function that
            is called with the options and returns any type that `as_metric` accepts.
        options: keyword arguments; `topk` also accepts the number k. Every metric has `output`,
            `label` and `value`: see `OfOutput`.
        metrics: registry of the names.

    Returns:
        The metric, without samples. Built-in metrics have `higher_is_better`. If a user-defined
        metric has none, larger values are better, unless its name sounds like an error; then
        `accuracy_criterion` has to set the direction.

    Raises:
        ConfigurationError: the name or an option is unknown, missing or of the wrong type.
        MetricError: the user-defined metric lacks a method.
    """
    if isinstance(options, int) and name in metrics and metrics.find(name) is metrics.find("topk"):
        options = {"k": options}
    if options is not None and not isinstance(options, Mapping):
        raise ConfigurationError(
            f"the options of metric {name!r} must be written as option: value, got {options!r}"
        )
    with error_path(name):
        scorer = _scorer(name, metrics)
        factory = metrics.find(name) if scorer is None else type(scorer)
    taken = _parameters(factory)
    choices = {k: v for k, v in (options or {}).items() if k in CHOICES and k not in taken}
    own = {k: v for k, v in (options or {}).items() if k not in choices}
    if scorer is not None:
        if own:
            with error_path(name, next(iter(own))):
                raise ConfigurationError(
                    f"metric {name!r} takes no options but {', '.join(CHOICES)}"
                )
        made: Any = scorer
    elif inspect.isfunction(factory) and takes_data(factory, own):
        made = _object(factory, own)
    else:
        made = metrics.build(name, own)
    missing = missing_methods(made)
    if missing and foreign(made) is None and not callable(made):
        raise MetricError(
            f"metric {name!r} is {with_article(type(made).__name__)} without "
            f"{' and '.join(missing)}; a metric needs update(preds, labels), reset() and result()"
        )
    with error_path(name):
        return chosen_from(_object(made, {}), choices)


def _scorer(name: object, metrics: Registry) -> Scorer | None:
    """Return the scikit-learn scorer of a name; None for our metrics and `module:attribute`.

    Raises:
        ConfigurationError: the name is unknown.
    """
    if not isinstance(name, str) or name in metrics or ":" in name or metrics is not METRICS:
        return None
    scorer = named_scorer(name)
    if scorer is None:
        near = did_you_mean(name, [*metrics, *scorer_names()])
        hint = near if "did you mean" in near else did_you_mean(name, metrics)
        raise ConfigurationError(
            f"unknown metric {name!r}{hint} (one of your own is named module:attribute)"
        )
    return scorer


def _parameters(factory: Callable[..., Any]) -> list[str]:
    try:
        return [*inspect.signature(factory).parameters]
    except (TypeError, ValueError):  # some C classes have no signature
        return []


def as_metric(given: Any, metrics: Registry = METRICS) -> Metric:
    """Convert a metric of any supported type.

    Args:
        given: the name of a metric; a function of all predictions and labels; a scorer or a
            function of scikit-learn; an object of ours, Keras, torchmetrics or `evaluate`; or one
            of these with options, `(metric, {"output": "mask"})`.
        metrics: registry of the names.

    Raises:
        ConfigurationError: a name or an option is unknown.
        MetricError: the type is not supported.
    """
    if is_with_options(given):
        return _with_options(given[0], given[1], metrics)
    if isinstance(given, str):
        return build_metric(given, None, metrics)
    return _object(given, {})


def is_with_options(given: object) -> bool:
    """Whether `given` is a metric with its options: `("topk", {"k": 5})`, `("topk", 5)`."""
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    is_number = isinstance(given[1], int) and not isinstance(given[1], bool)
    return isinstance(given[1], Mapping) or (isinstance(given[0], str) and is_number)


def unwrapped(subject: object) -> list[Any]:
    """Return the object and, step by step, all wrapped objects and partial functions inside."""
    found = [subject]
    while True:
        last = found[-1]
        inner = last.func if isinstance(last, partial) else getattr(last, "__wrapped__", None)
        if inner is None or any(inner is other for other in found):
            return found
        found.append(inner)


def metric_name(subject: object) -> str:
    """Return the name of a metric or function, or of its class."""
    chain = unwrapped(subject)
    named = (str(part.__name__) for part in chain if hasattr(part, "__name__"))
    return next(named, type(chain[-1]).__name__)


def _with_options(given: object, options: Any, metrics: Registry) -> Metric:
    if isinstance(given, str):
        return build_metric(given, options, metrics)
    choices = {key: value for key, value in options.items() if key in CHOICES}
    others = {key: value for key, value in options.items() if key not in CHOICES}
    return chosen_from(_object(given, others), choices)


def chosen_from(metric: Any, choices: Mapping[str, Any]) -> Metric:
    """Restrict a metric to one of several outputs or values.

    Raises:
        ConfigurationError: a choice is neither a name nor a position.
    """
    for key, value in choices.items():
        kinds = str if key == "value" else str | int
        if value is not None and (not isinstance(value, kinds) or isinstance(value, bool)):
            raise ConfigurationError(
                f"{key} of the metric {metric_name(metric)} must be a name"
                f"{'' if key == 'value' else ' or a position from 0'}, got {value!r}"
            )
    found: Metric = OfOutput(metric, **choices) if choices else metric
    return found


def _object(given: object, options: Mapping[str, Any]) -> Metric:
    """Convert an object or a function to a metric."""
    if isinstance(given, type):
        raise MetricError(f"metric is the class {given.__name__}; give an instance of it")
    found: Any = given if not options and not missing_methods(given) else foreign(given, options)
    if found is None:
        found = _function(given, options)
    if found is None:
        raise _no_metric(given, options)
    metric: Metric = found
    return metric


def _function(given: Any, options: Mapping[str, Any]) -> Metric | None:
    if is_scorer(given):
        return None if options else Scorer(given)
    if is_sklearn_function(given):
        return sklearn_function(given, options)
    if not callable(given) or any(callable(getattr(given, name, None)) for name in _METHODS):
        return None
    function: Callable[..., Any] = given
    return OverAllData(function, options)


def _no_metric(given: object, options: Mapping[str, Any]) -> MetricError:
    kind = type(given).__name__
    missing = missing_methods(given)
    if options and (not missing or foreign(given) or is_scorer(given)):
        return MetricError(
            f"the metric {kind} is an object already, so the options {', '.join(options)} come too "
            f"late; only {', '.join(CHOICES)} can be said of it"
        )
    if inspect.ismodule(given):
        kind = f"module {given.__name__}"
    return MetricError(
        f"the metric {kind} has no {missing[0]}(); a metric needs update(preds, labels), reset() "
        f"and result(), or is the name of one, a function of (predictions, labels), or a metric of "
        f"Keras, torchmetrics, scikit-learn or evaluate"
    )
