"""Metrics set by the user in Python or in a tuning file, and their direction."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, overload

import numpy as np

from neural_mp.api import config_objects
from neural_mp.common import Metric
from neural_mp.config import MetricSettings, Settings
from neural_mp.config.values import EACH, NO_METRICS, parse_bool_list, parse_number_list
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import ConfigurationError, DataError
from neural_mp.metrics import METRICS, convert_to_metric
from neural_mp.metrics.coercion import get_metric_name, is_with_options, unwrap_layers
from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.tuning.evaluation.metric_values import MetricAggregation

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
        names = self.names or [get_metric_name(metric) for metric, _ in self.pairs]
        object.__setattr__(self, "names", _number_repeated_names(names))
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
    given: object, settings: Settings, evaluation: Batches | None, eval_func: EvalFunc | None
) -> MetricSet:
    """Return the metrics set in Python, else those of the YAML file.

    Raises:
        ConfigurationError: a name, an option or a weight is invalid.
        MetricError: an object is not a metric.
        DataError: evaluation data are missing, or batches are not pairs.
    """
    metrics = _build_configured_metrics(settings) if given is None else parse_metrics(given)
    if metrics and eval_func is None:
        if evaluation is None:
            raise DataError(
                "a metric requires evaluation data, got none; set eval_dataloader "
                "(evaluation.accuracy.dataloader in YAML)"
            )
        next(evaluation.iterate_pairs())  # raises before a model is captured
    return metrics


def warn_replaced_metric(given: object, eval_func: EvalFunc | None) -> tuple[str, ...]:
    """Warn if Python sets both a metric and the evaluation function that replaces the metric."""
    if given is None or eval_func is None:
        return ()
    return ("metric is not used, as eval_func replaces the metric; set one of the two to None",)


def parse_metrics(given: Any) -> MetricSet:
    """Parse `metric`: a metric, a list (the mean counts), or a dict (each metric counts).

    Keys of a dict are names of built-in metrics with their options, or other names with metrics of
    any supported type; optional keys are `weight`, for a weighted sum, and `higher_is_better`.

    Raises:
        ConfigurationError: a name, an option or a weight is invalid.
        MetricError: an object is not a metric.
    """
    # A `MetricCollection` of torchmetrics has named metrics and one `compute`.
    collection = ("items", "compute", "update")
    by_name = isinstance(given, Mapping) or all(
        callable(getattr(given, name, None)) for name in collection
    )
    if by_name:
        named = {str(name): metric for name, metric in given.items() if name not in NO_METRICS}
        several = [_attach_metric_name(name, metric) for name, metric in named.items()]
    elif isinstance(given, list | tuple) and not is_with_options(given):
        several = list(given)
    else:
        several = [given]
    if not several:
        raise ConfigurationError(f"metric must have at least one metric, got {given!r}; add one")
    metrics = [convert_to_metric(metric) for metric in several]
    if not by_name:
        share = 1.0 / len(metrics)
        return MetricSet(tuple((metric, share) for metric in metrics))
    options = dict(given.items())
    higher = options.get("higher_is_better")
    directions: tuple[bool | None, ...] = ()
    if higher is not None:
        directions = tuple(parse_bool_list("metric: higher_is_better", higher, len(metrics)))
    weight = options.get("weight")
    if weight is None or weight == EACH:
        pairs = tuple((metric, 1.0) for metric in metrics)
        return MetricSet(pairs, tuple(named), len(metrics) > 1, directions)
    weights = parse_number_list("metric: weight", weight, len(metrics))
    return MetricSet(tuple(zip(metrics, weights, strict=True)), tuple(named), said=directions)


def _attach_metric_name(name: str, given: object) -> object:
    """Return a metric of a dict, with its name if `given` are the options of a built-in metric."""
    if given is None or isinstance(given, Mapping):
        return name, given or {}
    return (name, given) if type(given) is int and name in METRICS else given


def _build_configured_metrics(settings: Settings) -> MetricSet:
    pairs = config_objects.build_metrics(settings)
    items = settings.evaluation.metrics
    several = len(items) > 1
    return MetricSet(
        tuple(pairs),
        tuple(item.name.rpartition(":")[2] for item in items if several),
        every=several and all(item.weight is None for item in items),
        said=tuple(item.higher_is_better for item in items),
    )


def _number_repeated_names(names: Sequence[str]) -> tuple[str, ...]:
    often, counts = Counter(names), Counter[str]()
    numbered: list[str] = []
    for name in names:
        counts[name] += 1
        numbered.append(f"{name} {counts[name]}" if often[name] > 1 else name)
    return tuple(numbered)


def qualify_metric_name(metrics: WeightedMetrics, eval_func: EvalFunc | None) -> str:
    """Return the qualified name of the metric, so that a resumed run does not mix two scales."""
    if eval_func is not None:
        return _get_qualified_name(eval_func)
    parts = [f"{weight:g}·{_get_qualified_name(metric)}" for metric, weight in metrics]
    if isinstance(metrics, MetricSet) and metrics.every:
        return "each of " + ", ".join(
            f"{name}={_get_qualified_name(metric)}"
            for name, (metric, _) in zip(metrics.names, metrics, strict=True)
        )
    return ", ".join(parts)


def _get_qualified_name(subject: object) -> str:
    """Return the qualified name of a function or of the class of an object, with its module."""
    inner = unwrap_layers(subject)[-1]
    kind = inner if hasattr(inner, "__qualname__") else type(inner)
    name = f"{kind.__module__}.{kind.__qualname__}"
    own = getattr(subject, "__name__", None)
    return f"{name} as {own}" if own and own != kind.__name__ else name


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
        if self.said is not None:
            return None
        for alias in self.aliases:
            words = [word.lower() for word in _WORD.findall(alias)]
            if any(word in _ERROR_WORDS or word.endswith(_ERROR_ENDINGS) for word in words):
                return alias
        return None

    def __str__(self) -> str:
        if self.said is None:
            return f"{self.name} has no direction, so higher is better"
        return f"{self.name}: {'higher' if self.said else 'lower'} is better"


def resolve_direction(
    criterion: AccuracyCriterion,
    metrics: WeightedMetrics,
    eval_func: EvalFunc | None,
    configured: Sequence[MetricSettings] = (),
) -> AccuracyCriterion:
    """Return the criterion with a direction: the user's, else the metric's, else higher is better.

    `eval_func` replaces the metrics if set; `configured` are the metrics as named in YAML.

    Raises:
        ConfigurationError: criterion and metrics contradict each other, or the direction is
            undeclared and the name suggests an error.
    """
    measures = _list_contributing_measures(metrics, eval_func, configured)
    if eval_func is None and isinstance(metrics, MetricSet) and metrics.every:
        return replace(criterion, higher_is_better=True)  # see `build_aggregation`
    declared = {measure.said for measure in measures if measure.said is not None}
    if len(declared) > 1:
        raise _mixed_directions_error(measures)
    chosen = criterion.higher_is_better
    if chosen is not None:
        if declared and chosen not in declared:
            raise _make_contradiction_error(chosen, measures)
        return criterion
    for measure in measures:
        if measure.doubtful_name is not None:
            raise _doubtful_direction_error(measure)
    directions = {measure.said is not False for measure in measures} or {True}
    if len(directions) > 1:
        raise _mixed_directions_error(measures)
    return replace(criterion, higher_is_better=directions.pop())


def format_metric_label(metrics: WeightedMetrics, eval_func: EvalFunc | None) -> str:
    """Return the name of the metric for tables: `RMSE`, `0.5·F1 + 0.5·AUC`."""
    if eval_func is not None:
        return _measure_name(eval_func)
    names = [_measure_name(metric) for metric, _ in metrics]
    if isinstance(metrics, MetricSet) and (metrics.every or len(metrics) == 1):
        return ", ".join(metrics.names)
    return " + ".join(
        name if weight == 1 else f"{weight:.3g}·{name}"
        for name, (_, weight) in zip(names, metrics, strict=True)
    )


def build_aggregation(
    metrics: MetricSet, criterion: AccuracyCriterion, eval_func: EvalFunc | None = None
) -> MetricAggregation:
    """Return the aggregation of several metrics, or values of `eval_func`, to one number.

    The direction of the user's criterion applies to metrics without their own, and that of the only
    metric to the values that the metric returns by name.

    Raises:
        ConfigurationError: a direction contradicts the metric's own; or every metric has to meet
            the target and a direction is unknown.
    """
    default = criterion.higher_is_better
    higher: dict[str, bool] = {}
    for name, chosen, (metric, _) in zip(metrics.names, metrics.said, metrics, strict=True):
        measure = replace(_build_measure(metric, name), name=name)
        if chosen is not None and measure.said is not None and chosen != measure.said:
            raise ConfigurationError(
                f"{measure}, but higher_is_better is {chosen}; remove higher_is_better"
            )
        stated = next((flag for flag in (chosen, measure.said, default) if flag is not None), None)
        if stated is None and measure.doubtful_name is not None and metrics.every:
            raise _doubtful_direction_error(measure)
        higher[name] = stated is not False
    only = metrics[0][0] if len(metrics) == 1 else eval_func
    if default is None and only is not None:
        default = _build_measure(only if eval_func is None else eval_func).said
    if metrics.every and eval_func is None:
        criterion = replace(criterion, higher_is_better=True)  # see `resolve_direction`
    elif default is not None:
        criterion = replace(criterion, higher_is_better=default)
    return MetricAggregation(
        metrics.names, metrics.every, criterion, higher, partial(_is_higher_better, default)
    )


def _is_higher_better(default: bool | None, name: str) -> bool:
    """Whether higher is better for a value that a user's metric returns under this name."""
    registered = METRICS.find_factory(name) if ":" not in name and name in METRICS else None
    declared = _find_declared_direction([registered]) if registered is not None else None
    measure = _Measure(name, declared if declared is not None else default, (name,))
    if measure.doubtful_name is not None:
        raise _doubtful_direction_error(measure)
    return measure.said is not False


def _list_contributing_measures(
    metrics: WeightedMetrics, eval_func: EvalFunc | None, configured: Sequence[MetricSettings]
) -> list[_Measure]:
    if eval_func is not None:
        return [_build_measure(eval_func)]
    # A YAML name may be a factory whose name reveals more than the class of the metric.
    names = [item.name.rpartition(":")[2] for item in configured] or [""] * len(metrics)
    pairs = zip(metrics, names, strict=True)
    return [_build_measure(metric, name) for (metric, weight), name in pairs if weight]


def _build_measure(subject: object, *names: str) -> _Measure:
    own = unwrap_layers(subject)
    kinds = [kind.__name__ for kind in type(own[-1]).__mro__]
    return _Measure(
        _measure_name(subject),
        _find_declared_direction(own),
        (_measure_name(subject), *kinds, *names),
    )


def _find_declared_direction(subjects: Sequence[Any]) -> bool | None:
    """Return the first `higher_is_better` that is set; None if undeclared."""
    for subject in subjects:
        value = getattr(subject, "higher_is_better", None)
        if isinstance(value, bool | np.bool_):
            return bool(value)
        if value is not None:
            raise ConfigurationError(
                f"higher_is_better of {_measure_name(subject)} must be True or False, got {value!r}"
            )
    return None


def _measure_name(subject: object) -> str:
    name = get_metric_name(subject)
    return "eval_func" if name == "<lambda>" else name


def _doubtful_direction_error(measure: _Measure) -> ConfigurationError:
    return ConfigurationError(
        f"the direction of {measure.name} is not known: {measure.doubtful_name} may be an error, "
        f"for which lower is better; set higher_is_better to False (or True) in "
        f"accuracy_criterion, or give {measure.name} an attribute higher_is_better"
    )


def _make_contradiction_error(chosen: bool, measures: Sequence[_Measure]) -> ConfigurationError:
    stated = "; ".join(str(measure) for measure in measures if measure.said is not None)
    return ConfigurationError(
        f"{stated}, but accuracy_criterion has higher_is_better: {chosen}; remove higher_is_better "
        f"from accuracy_criterion to use the metric's own direction"
    )


def _mixed_directions_error(measures: Sequence[_Measure]) -> ConfigurationError:
    return ConfigurationError(
        f"metrics of a sum must have one direction, got {'; '.join(map(str, measures))}; keep "
        f"metrics of one direction, or set their attribute higher_is_better"
    )
