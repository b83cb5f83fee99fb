"""The metrics that a user gives, in Python or in a tuning file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from neural_mp.api import config_objects
from neural_mp.common import Metric
from neural_mp.config import Settings
from neural_mp.config.values import EACH, bools_of, numbers_of
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.metrics import METRICS, as_metric, build_metric
from neural_mp.metrics.coercion import is_with_options, metric_name, unwrapped
from neural_mp.tuning.batches import Batches

EvalFunc = Callable[[Any], float]
#: Metrics with their weights; the accuracy is the weighted sum.
WeightedMetrics = Sequence[tuple[Metric, float]]

#: What stands beside the metrics of a dict.
_NO_METRICS = ("weight", "higher_is_better")


@dataclass(frozen=True)
class MetricSet(Sequence[tuple[Metric, float]]):
    """Metrics with their weights.

    Attributes:
        pairs: metrics with their weights.
        names: what each is called; no two alike.
        every: whether every one has to meet the target; else the weighted sum of all.
        said: what was said of each: whether its larger value is the better one; None for nothing.
    """

    pairs: tuple[tuple[Metric, float], ...] = ()
    names: tuple[str, ...] = ()
    every: bool = False
    said: tuple[bool | None, ...] = ()

    @overload
    def __getitem__(self, index: int) -> tuple[Metric, float]: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[Metric, float]]: ...

    def __getitem__(self, index: int | slice) -> Any:
        return self.pairs[index]

    def __len__(self) -> int:
        return len(self.pairs)


def gather_metrics(
    given: object,
    settings: Settings,
    evaluation: Batches | None,
    eval_func: EvalFunc | None,
) -> MetricSet:
    """The metrics set in Python, else those of the YAML file.

    Raises:
        ConfigurationError: a name, an option or a weight is wrong.
        MetricError: one of them is no metric.
        DataError: there is no data to compute them over, or its batches are no pairs.
    """
    metrics = _configured(settings) if given is None else given_metrics(given)
    if metrics and eval_func is None:
        if evaluation is None:
            raise DataError(
                "a metric was given but no data to compute it over; set eval_dataloader "
                "(evaluation.accuracy.dataloader in YAML)"
            )
        next(evaluation.pairs())  # a wrong form is said before anything is captured
    return metrics


def given_metrics(given: Any) -> MetricSet:
    """What was set as `metric`: one, a list of which the mean counts, or a dict of which each does.

    A dict has names of our metrics with their options, names of the user's own with metrics of any
    form, or both; and maybe `weight`, by which it is a weighted sum, and `higher_is_better`.

    Raises:
        ConfigurationError: a name, an option or a weight is wrong.
        MetricError: one of them is no metric.
    """
    if isinstance(given, Mapping) or _is_collection(given):
        return _each(dict(given.items()))
    several = given if isinstance(given, list | tuple) and not is_with_options(given) else [given]
    if not several:
        raise ConfigurationError("metric is an empty list; give at least one metric")
    metrics = [as_metric(metric) for metric in several]
    names = _unlike([metric_name(metric) for metric in metrics])
    share = 1.0 / len(metrics)
    return MetricSet(tuple((m, share) for m in metrics), names, said=(None,) * len(metrics))


def _each(given: Mapping[Any, Any]) -> MetricSet:
    """The metrics of a dict."""
    named = {str(name): metric for name, metric in given.items() if name not in _NO_METRICS}
    if not named:
        raise ConfigurationError("metric is a dict without a metric; give at least one")
    metrics = [_named(name, metric) for name, metric in named.items()]
    said: Sequence[bool | None] = [None] * len(metrics)
    if given.get("higher_is_better") is not None:
        said = bools_of("metric: higher_is_better", given["higher_is_better"], len(metrics))
    weight = given.get("weight")
    if weight is None or weight == EACH:
        pairs = tuple((metric, 1.0) for metric in metrics)
        return MetricSet(pairs, tuple(named), len(metrics) > 1, tuple(said))
    weights = numbers_of("metric: weight", weight, len(metrics))
    return MetricSet(tuple(zip(metrics, weights, strict=True)), tuple(named), said=tuple(said))


def _named(name: str, given: object) -> Metric:
    """A metric of a dict: with its options where it goes by its name, else of any form."""
    if given is None or isinstance(given, Mapping) or (type(given) is int and name in METRICS):
        return build_metric(name, given)
    return as_metric(given)


def _is_collection(given: object) -> bool:
    """Whether it is a `MetricCollection` of torchmetrics: metrics by name, with one `compute`."""
    return all(callable(getattr(given, name, None)) for name in ("items", "compute", "update"))


def _configured(settings: Settings) -> MetricSet:
    pairs = config_objects.metrics(settings)
    items = settings.evaluation.metrics
    names = _unlike([metric_name(metric) for metric, _ in pairs])
    if len(items) > 1:
        names = _unlike([item.name.rpartition(":")[2] for item in items])
    every = len(items) > 1 and all(item.weight is None for item in items)
    said = tuple(item.higher_is_better for item in items)
    return MetricSet(tuple(pairs), names, every, said)


def _unlike(names: Sequence[str]) -> tuple[str, ...]:
    """The names, numbered where several are alike."""
    often, seen = Counter(names), Counter[str]()
    found: list[str] = []
    for name in names:
        seen[name] += 1
        found.append(f"{name} {seen[name]}" if often[name] > 1 else name)
    return tuple(found)


def metric_words(metrics: WeightedMetrics, eval_func: EvalFunc | None) -> str:
    """What measures the accuracy, by name: resuming with another would mix two scales."""
    if eval_func is not None:
        return _qualified(eval_func)
    words = [f"{weight:g}·{_qualified(metric)}" for metric, weight in metrics]
    if isinstance(metrics, MetricSet) and metrics.every:
        return "each of " + ", ".join(
            f"{name}={_qualified(metric)}"
            for name, (metric, _) in zip(metrics.names, metrics, strict=True)
        )
    return ", ".join(words)


def _qualified(subject: object) -> str:
    """The name of a function, or of the class of an object, with that of its module."""
    inner = unwrapped(subject)[-1]
    kind = inner if hasattr(inner, "__qualname__") else type(inner)
    words = f"{kind.__module__}.{kind.__qualname__}"
    own = getattr(subject, "__name__", None)
    return f"{words} as {own}" if own and own != kind.__name__ else words
