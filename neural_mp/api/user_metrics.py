"""Metrics set by the user in Python or in a tuning file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, overload

from neural_mp.api import config_objects
from neural_mp.common import Metric
from neural_mp.config import Settings
from neural_mp.config.values import EACH, NO_METRICS, bools_of, numbers_of
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.metrics import METRICS, as_metric
from neural_mp.metrics.coercion import is_with_options, metric_name, unwrapped
from neural_mp.tuning.evaluation.batches import Batches

EvalFunc = Callable[[Any], float]
#: Metrics with their weights; the accuracy is the weighted sum.
WeightedMetrics = Sequence[tuple[Metric, float]]


@dataclass(frozen=True)
class MetricSet(Sequence[tuple[Metric, float]]):
    """Metrics with their weights.

    Attributes:
        pairs: metrics with their weights.
        names: unique names of the metrics; default: their own, numbered if they repeat.
        every: whether every metric has to meet the target; else the weighted sum.
        said: `higher_is_better` set by the user for each metric; None if unset.
    """

    pairs: tuple[tuple[Metric, float], ...] = ()
    names: tuple[str, ...] = ()
    every: bool = False
    said: tuple[bool | None, ...] = ()

    def __post_init__(self) -> None:
        names = self.names or [metric_name(metric) for metric, _ in self.pairs]
        object.__setattr__(self, "names", _unlike(names))
        object.__setattr__(self, "said", self.said or (None,) * len(self.pairs))

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
    """Return the metrics set in Python, else those of the YAML file.

    Raises:
        ConfigurationError: a name, an option or a weight is invalid.
        MetricError: an object is not a metric.
        DataError: evaluation data are missing, or batches are not pairs.
    """
    metrics = _configured(settings) if given is None else given_metrics(given)
    if metrics and eval_func is None:
        if evaluation is None:
            raise DataError(
                "a metric requires evaluation data, got none; set eval_dataloader "
                "(evaluation.accuracy.dataloader in YAML)"
            )
        next(evaluation.pairs())  # raises before a model is captured
    return metrics


def replaced_metric(given: object, eval_func: EvalFunc | None) -> tuple[str, ...]:
    """Warn if Python sets both a metric and the evaluation function that replaces the metric."""
    if given is None or eval_func is None:
        return ()
    return ("metric is not used, as eval_func replaces the metric; set one of the two to None",)


def given_metrics(given: Any) -> MetricSet:
    """Parse `metric`: a metric, a list (the mean counts), or a dict (each metric counts).

    Keys of a dict are names of built-in metrics with their options, or other names with metrics of
    any supported type; optional keys are `weight`, for a weighted sum, and `higher_is_better`.

    Raises:
        ConfigurationError: a name, an option or a weight is invalid.
        MetricError: an object is not a metric.
    """
    by_name = isinstance(given, Mapping) or _is_collection(given)
    if by_name:
        named = {str(name): metric for name, metric in given.items() if name not in NO_METRICS}
        several = [_with_name(name, metric) for name, metric in named.items()]
    elif isinstance(given, list | tuple) and not is_with_options(given):
        several = list(given)
    else:
        several = [given]
    if not several:
        raise ConfigurationError(f"metric must have at least one metric, got {given!r}; add one")
    metrics = [as_metric(metric) for metric in several]
    if not by_name:
        share = 1.0 / len(metrics)
        return MetricSet(tuple((metric, share) for metric in metrics))
    directions: tuple[bool | None, ...] = ()
    options = dict(given.items())
    if options.get("higher_is_better") is not None:
        directions = (
            *bools_of("metric: higher_is_better", options["higher_is_better"], len(metrics)),
        )
    weight = options.get("weight")
    if weight is None or weight == EACH:
        pairs = tuple((metric, 1.0) for metric in metrics)
        return MetricSet(pairs, tuple(named), len(metrics) > 1, directions)
    weights = numbers_of("metric: weight", weight, len(metrics))
    return MetricSet(tuple(zip(metrics, weights, strict=True)), tuple(named), said=directions)


def _with_name(name: str, given: object) -> object:
    """Return a metric of a dict, with its name if `given` are the options of a built-in metric."""
    if given is None or isinstance(given, Mapping):
        return name, given or {}
    return (name, given) if type(given) is int and name in METRICS else given


def _is_collection(given: object) -> bool:
    """Whether an object is a `MetricCollection` of torchmetrics: named metrics, one `compute`."""
    return all(callable(getattr(given, name, None)) for name in ("items", "compute", "update"))


def _configured(settings: Settings) -> MetricSet:
    pairs = config_objects.metrics(settings)
    items = settings.evaluation.metrics
    several = len(items) > 1
    return MetricSet(
        tuple(pairs),
        tuple(item.name.rpartition(":")[2] for item in items if several),
        every=several and all(item.weight is None for item in items),
        said=tuple(item.higher_is_better for item in items),
    )


def _unlike(names: Sequence[str]) -> tuple[str, ...]:
    """Return the names, numbered if they repeat."""
    often, counts = Counter(names), Counter[str]()
    numbered: list[str] = []
    for name in names:
        counts[name] += 1
        numbered.append(f"{name} {counts[name]}" if often[name] > 1 else name)
    return tuple(numbered)


def metric_words(metrics: WeightedMetrics, eval_func: EvalFunc | None) -> str:
    """Return the qualified name of the metric, so that a resumed run does not mix two scales."""
    if eval_func is not None:
        return _qualified(eval_func)
    parts = [f"{weight:g}·{_qualified(metric)}" for metric, weight in metrics]
    if isinstance(metrics, MetricSet) and metrics.every:
        return "each of " + ", ".join(
            f"{name}={_qualified(metric)}"
            for name, (metric, _) in zip(metrics.names, metrics, strict=True)
        )
    return ", ".join(parts)


def _qualified(subject: object) -> str:
    """Return the qualified name of a function or of the class of an object, with its module."""
    inner = unwrapped(subject)[-1]
    kind = inner if hasattr(inner, "__qualname__") else type(inner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    own = getattr(subject, "__name__", None)
    return f"{name} as {own}" if own and own != kind.__name__ else name
