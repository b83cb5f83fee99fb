"""Conversion of user-defined metrics and metric names to `Metric`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from functools import partial
from typing import Any

from neural_mp.common import Metric
from neural_mp.data.registry import Registry
from neural_mp.errors import ConfigurationError, MetricError, error_path
from neural_mp.metrics.base import METRICS
from neural_mp.metrics.function_metric import list_function_parameters, takes_data
from neural_mp.metrics.predictions import OfOutput
from neural_mp.metrics.third_party import Scorer, find_named_scorer, options_too_late, wrap_metric

#: Options common to all metrics: the selected output, labels and value.
CHOICES = ("output", "label", "value")
#: Name of a metric of the k highest scores, `ndcg@10`.
_DEPTH = re.compile(r"(\w+)@(\d+)")


def build_metric(
    name: str, options: Mapping[str, Any] | int | None = None, metrics: Registry = METRICS
) -> Metric:
    """Build the metric of a name.

    Args:
        name: a registered metric; a scorer of scikit-learn, e.g. `f1_macro`; or a user-defined
            `module:attribute`: a function of predictions and labels, or a class or function that
            is called with the options and returns any type that `convert_to_metric` accepts.
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
    return _coerce_metric(name, options, metrics)


def convert_to_metric(given: Any, metrics: Registry = METRICS) -> Metric:
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
    options = None
    if is_with_options(given):
        given, options = given
    return _coerce_metric(given, options, metrics)


def is_with_options(given: object) -> bool:
    """Whether `given` is a metric with its options: `("topk", {"k": 5})`, `("topk", 5)`."""
    if not isinstance(given, tuple) or len(given) != 2:
        return False
    is_number = isinstance(given[1], int) and not isinstance(given[1], bool)
    return isinstance(given[1], Mapping) or (isinstance(given[0], str) and is_number)


def _coerce_metric(source: Any, options: Any, metrics: Registry) -> Metric:
    """Convert a name, an object or a function to a metric of one output, label or value."""
    with error_path(*([source] if isinstance(source, str) else [])):
        if isinstance(source, str):
            source, options, choices = _resolve_metric_name(source, options, metrics)
        else:
            choices = {key: v for key, v in (options or {}).items() if key in CHOICES}
            options = {key: v for key, v in (options or {}).items() if key not in CHOICES}
        if isinstance(source, type):
            raise MetricError(
                f"the metric must be an instance, got the class {source.__name__}; create an "
                f"instance"
            )
        needed = ("update", "reset", "result")
        missing = [name for name in needed if not callable(getattr(source, name, None))]
        if options and not missing:
            raise options_too_late(source, options)
        instance = wrap_metric(source, options) if missing else source
        if instance is None:
            is_module = inspect.ismodule(source)
            name = f"module {source.__name__}" if is_module else type(source).__name__
            methods = " and ".join(f"{method}()" for method in missing)
            raise MetricError(
                f"the metric {name} has no {methods}; a metric must have update(preds, "
                f"labels), reset() and result(), or be the name of a metric, a function of "
                f"(predictions, labels), or a metric of Keras, torchmetrics, scikit-learn or "
                f"evaluate"
            )
        metric: Metric = OfOutput(instance, **choices) if choices else instance
        return metric


def _resolve_metric_name(
    name: str, options: object, metrics: Registry
) -> tuple[Any, Mapping[str, Any], Mapping[str, Any]]:
    """Return the object of a name, its options that are not applied yet, and its choices."""
    depth = _DEPTH.fullmatch(name)
    if depth is not None and not options and f"{depth[1]}@k" in metrics:
        name, options = f"{depth[1]}@k", {"k": int(depth[2])}
    is_known = name in metrics or ":" in name or metrics is not METRICS
    scorer = None if is_known else find_named_scorer(name, metrics)
    factory = metrics.find_factory(name) if scorer is None else Scorer
    if isinstance(options, int) and factory is metrics.find_factory("topk"):
        options = {"k": options}
    if options is not None and not isinstance(options, Mapping):
        raise ConfigurationError(
            f"the options of metric {name!r} must be written as option: value, got {options!r}"
        )
    parameters = [parameter.name for parameter in list_function_parameters(factory) or ()]
    choices = {k: v for k, v in (options or {}).items() if k in CHOICES and k not in parameters}
    own = {k: v for k, v in (options or {}).items() if k not in choices}
    if scorer is not None:
        for option in own:
            error = ConfigurationError(f"metric {name!r} has no options but {', '.join(CHOICES)}")
            error.keys = (option,)
            raise error
        return scorer, {}, choices
    if inspect.isfunction(factory) and takes_data(factory, own):
        return factory, own, choices
    return metrics.call_factory(name, factory, own), {}, choices


def unwrap_layers(subject: object) -> list[Any]:
    """Return the object and, step by step, all wrapped objects and partial functions inside."""
    chain = [subject]
    while True:
        last = chain[-1]
        inner = last.func if isinstance(last, partial) else getattr(last, "__wrapped__", None)
        if inner is None or any(inner is item for item in chain):
            return chain
        chain.append(inner)


def get_metric_name(subject: object) -> str:
    """Return the name of a metric or function, or of its class."""
    chain = unwrap_layers(subject)
    named = (str(part.__name__) for part in chain if hasattr(part, "__name__"))
    return next(named, type(chain[-1]).__name__)
