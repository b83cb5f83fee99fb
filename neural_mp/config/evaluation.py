"""The evaluation section → `EvaluationSettings`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from neural_mp.config.inc_dialect import why_ignored
from neural_mp.config.settings import EvaluationSettings, MetricSettings, PerformanceSettings
from neural_mp.config.source import KeyPath, Source
from neural_mp.config.values import EACH, bools_of, numbers_of
from neural_mp.core.enums import Dialect

_ACCURACY: KeyPath = ("evaluation", "accuracy")
_PERFORMANCE: KeyPath = ("evaluation", "performance")
#: Keys of `multi_metrics` that are not metrics.
_NO_METRICS = ("weight", "higher_is_better")


def evaluation(source: Source, data: Mapping[str, Any], dialect: Dialect) -> EvaluationSettings:
    """Return the settings of the accuracy and latency measurements.

    Raises:
        ConfigurationError: metrics are given twice, or with invalid options or weights.
    """
    accuracy = data.get("accuracy", {})
    return EvaluationSettings(
        metrics=_metrics(source, accuracy, dialect),
        dataloader=accuracy.get("dataloader"),
        postprocess=accuracy.get("postprocess", {}).get("transform"),
        performance=_performance(source, data.get("performance", {})),
        max_batches=accuracy.get("max_batches"),
    )


def _metrics(
    source: Source, accuracy: Mapping[str, Any], dialect: Dialect
) -> tuple[MetricSettings, ...]:
    if "metric" in accuracy and "multi_metrics" in accuracy:
        raise source.error(_ACCURACY, "metric and multi_metrics are both given; keep one of them")
    if "multi_metrics" in accuracy:
        return _several(source, accuracy["multi_metrics"], (*_ACCURACY, "multi_metrics"), dialect)
    if "metric" in accuracy:
        return (_single(source, accuracy["metric"], (*_ACCURACY, "metric")),)
    return ()


def _single(source: Source, value: str | dict[str, Any], path: KeyPath) -> MetricSettings:
    named = {value: None} if isinstance(value, str) else value
    if len(named) != 1:
        found = ", ".join(named) or "none"
        raise source.error(
            path, f"expected one metric, found {found}; several are given as multi_metrics"
        )
    name, options = next(iter(named.items()))
    return _metric(source, name, options, (*path, name))


def _several(
    source: Source, value: dict[str, Any], path: KeyPath, dialect: Dialect
) -> tuple[MetricSettings, ...]:
    named = {name: options for name, options in value.items() if name not in _NO_METRICS}
    metrics = [_metric(source, name, options, (*path, name)) for name, options in named.items()]
    names = [metric.name for metric in metrics]
    if len(set(names)) < len(names) or not names:
        what = "the same metric is given twice" if names else "expected at least one metric"
        raise source.error(path, f"{what}, found {', '.join(names) or 'none'}")
    weights = _weights(source, value.get("weight"), names, (*path, "weight"), dialect)
    directions: Sequence[bool | None] = [None] * len(names)
    said, here = value.get("higher_is_better"), (*path, "higher_is_better")
    if said is not None and None in weights:
        with source.at(here):
            directions = bools_of("of each", said, len(names))
    elif said is not None:
        source.ignored(here, why_ignored(here) or "")
    rows = zip(metrics, weights, directions, strict=True)
    return tuple(MetricSettings(m.name, m.options, weight, up) for m, weight, up in rows)


def _metric(source: Source, name: str, options: object, path: KeyPath) -> MetricSettings:
    if not name.strip():
        raise source.error(path, "expected the name of a metric, found an empty word")
    name = name.strip() if ":" in name else name.strip().lower()
    if options is None:
        return MetricSettings(name)
    if isinstance(options, dict):
        return MetricSettings(name, options)
    if name != "topk":
        raise source.error(path, f"expected a mapping of its options, found {options!r}")
    if not isinstance(options, int) or isinstance(options, bool) or options < 1:
        raise source.error(path, f"expected a whole number from 1, found {options!r}")
    return MetricSettings(name, {"k": options})


def _weights(
    source: Source, value: object, names: list[str], path: KeyPath, dialect: Dialect
) -> Sequence[float | None]:
    """Return one weight per metric; None for each if every metric has to meet the target."""
    if value == EACH or (value is None and dialect is Dialect.INC):
        return [None if len(names) > 1 else 1.0] * len(names)
    if value is None:
        return [1.0 / len(names)] * len(names)
    with source.at(path):
        return numbers_of(f"one for each of {', '.join(names)}", value, len(names))


def _performance(source: Source, data: Mapping[str, Any]) -> PerformanceSettings:
    given = {key: value for key, value in data.items() if key != "configs"}
    if given.get("iteration") == -1:
        source.ignored((*_PERFORMANCE, "iteration"), "-1 has no meaning; the default is used")
        del given["iteration"]
    theirs = data.get("configs", {}).get("cores_per_instance")
    ours = given.setdefault("cores_per_instance", theirs)
    if theirs is not None and ours != theirs:
        raise source.error(
            (*_PERFORMANCE, "cores_per_instance"),
            f"found {ours}, but configs.cores_per_instance says {theirs}; keep one of the two",
        )
    return PerformanceSettings(**given)
