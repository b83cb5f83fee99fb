"""What a metric is given of one batch, looked at before the user's own code sees it."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from neural_mp.errors import DataError, MetricError
from neural_mp.tuning.criterion import AccuracyCriterion
from neural_mp.util.pytree import float_arrays, tree_leaves
from neural_mp.util.text import shape_words
from neural_mp.util.user_calls import UserCodeError, call_user

#: What Python and numpy raise for values of the wrong form; a class of the user's own says more.
_OF_THE_FORM = (TypeError, ValueError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class MetricBatch:
    """A batch with what a model makes of it.

    Attributes:
        predictions: what the model returned.
        labels: those of the batch.
        place: which batch of which loader it is, in words.
    """

    predictions: Any
    labels: Any
    place: str

    def check(self, is_first: bool) -> None:
        """Check that there is something to measure.

        Args:
            is_first: whether the values are looked at, too, and not only what holds them.

        Raises:
            MetricError: the model returns nothing that holds numbers, or nothing but NaN.
        """
        found = tree_leaves(self.predictions)
        if not any(hasattr(leaf, "shape") or isinstance(leaf, int | float) for leaf in found):
            raise MetricError(
                f"the model returns {shape_words(self.predictions)} for {self.place}; metrics need "
                f"an array, or several in a tuple, list or dict; to measure something else, give "
                f"eval_func"
            )
        arrays = [array for array in float_arrays(self.predictions) if array.size]
        if is_first and arrays and all(np.isnan(array).all() for array in arrays):
            raise MetricError(
                f"the model returns nothing but NaN for {self.place} "
                f"({shape_words(self.predictions)}); check its weights, and what is done with the "
                f"inputs before"
            )

    def postprocessed(self, postprocess: Callable[[Any], Any]) -> MetricBatch:
        """The batch as a postprocess of the user's leaves it.

        Raises:
            DataError: it does not return a pair.
            UserCodeError: it raised.
        """
        given = (self.predictions, self.labels)
        form = "postprocess((predictions, labels))"
        found = call_user(postprocess, given, form=form, kind=DataError)
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise DataError(
                f"postprocess must return (predictions, labels), got {shape_words(found)}"
            )
        return MetricBatch(found[0], found[1], self.place)

    def update(self, update: Callable[[Any, Any], Any], name: str) -> None:
        """Have a metric take in the batch.

        Args:
            update: the metric's method.
            name: of the metric.

        Raises:
            MetricError: the method takes something else.
            DataError: it raised, and what it was given hardly fits together.
            UserCodeError: it raised.
        """
        form = f"{name}.update(predictions, labels)"
        try:
            call_user(update, self.predictions, self.labels, form=form, kind=MetricError)
        except UserCodeError as failure:
            doubt = self._doubt() if type(failure.error) in _OF_THE_FORM else ""
            if doubt:
                raise DataError(
                    f"{self.place} {doubt}, and {name}.update raised {failure}"
                ) from failure.error
            raise

    def _doubt(self) -> str:
        """Why predictions and labels hardly belong together; empty where nothing is odd."""
        if self.labels is None:
            return f"has None for labels, predictions are {shape_words(self.predictions)}"
        counts = [_first_axis(value) for value in (self.predictions, self.labels)]
        if None not in counts and counts[0] != counts[1]:
            return (
                f"has predictions {shape_words(self.predictions)} and labels "
                f"{shape_words(self.labels)}, of which the first axes should be equal"
            )
        return ""


def _first_axis(value: object) -> int | None:
    """How many samples an array holds; None for what is no array of samples."""
    if isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
        return len(value)
    shape: Any = getattr(value, "shape", ())
    return int(shape[0]) if len(shape) else None


def _higher(name: str) -> bool:
    return True


@dataclass(frozen=True)
class MetricAggregation:
    """How the values of several metrics become one number.

    Either that is their weighted sum. Or every one of them has to meet the target, each in its own
    direction; then the number is a score that falls short of 1, which FP32 has, by the largest of
    their losses: 0.993 where the accuracy lost 0.7 % of FP32's and the F1 score less. (It exceeds 1
    by as much where the criterion says that lower is better.) It meets the target when all do.

    Attributes:
        names: what the metrics are called, in their order.
        require_all: whether every one has to meet the target.
        criterion: what that is, for each of them.
        higher: name → whether its larger value is the better one.
        direction: the same, of a value that a metric or `eval_func` gives under a name of its own.
        baseline: name → FP32's value; empty before it was measured.
    """

    names: tuple[str, ...] = ()
    require_all: bool = False
    criterion: AccuracyCriterion = AccuracyCriterion()
    higher: Mapping[str, bool] = field(default_factory=dict)
    direction: Callable[[str], bool] = _higher
    baseline: Mapping[str, float] = field(default_factory=dict)

    def with_baseline(self, values: Mapping[str, float], every: bool) -> MetricAggregation:
        """The same, with FP32's values known, and whether each of them has to be met."""
        return replace(self, baseline=dict(values), require_all=self.require_all or every)

    def score(self, values: Mapping[str, float]) -> float:
        """1 less the largest loss; NaN where a value is not finite.

        Raises:
            MetricError: the values have other names than FP32's.
            ConfigurationError: it is not known which way is better.
        """
        if not values:
            raise MetricError("a metric must return a number, got a dict without any")
        baseline = self.baseline or values
        if baseline.keys() != values.keys():
            raise MetricError(
                f"the metric gives {', '.join(values)}, but for FP32 it gave {', '.join(baseline)}"
            )
        losses = [self.criterion_of(name).loss(baseline[name], values[name]) for name in values]
        if not all(map(math.isfinite, (*values.values(), *losses))):
            return math.nan
        return 1 - max(losses) if self.criterion.prefers_higher else 1 + max(losses)

    def targets(self) -> dict[str, float]:
        """Name → the worst value that is accepted, of the metrics that have a target each."""
        return {
            name: self.criterion_of(name).target(value) for name, value in self.baseline.items()
        }

    def criterion_of(self, name: str) -> AccuracyCriterion:
        """The criterion in the direction of a metric."""
        higher = self.higher[name] if name in self.higher else self.direction(name)
        return replace(self.criterion, higher_is_better=higher)


def as_scalar(value: Any, name: str) -> float:
    """The number that a result is.

    Args:
        value: what a metric or evaluation function gave.
        name: of the metric or function.

    Raises:
        MetricError: it is no number.
    """
    if callable(getattr(value, "item", None)):  # numpy scalars, tensors of any framework
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise MetricError(f"{name} must return one number, got {shape_words(value)}") from None
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise MetricError(f"{name} must return a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise MetricError(f"{name} must return a number that fits a float") from None


def is_usable(accuracy: float) -> bool:
    """Whether an accuracy can be compared: neither NaN nor infinite."""
    return math.isfinite(accuracy)
