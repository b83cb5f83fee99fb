"""Checks of metric inputs before user code receives them, and aggregation of metric values."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import DataError, MetricError, message_of
from neural_mp.util.pytree import float_arrays, tree_leaves
from neural_mp.util.text import shape_words, with_article
from neural_mp.util.user_calls import UserCodeError, call_user

#: Python's and NumPy's errors for malformed values; user-defined classes are more specific.
_OF_THE_FORM = (TypeError, ValueError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class MetricBatch:
    """A batch with the predictions of a model; `place` is its number and loader, as text."""

    predictions: Any
    labels: Any
    place: str

    def check(self, is_first: bool) -> None:
        """Check that predictions hold usable numbers; of values only if `is_first`.

        Raises:
            MetricError: the model returns no numbers, or only NaN.
        """
        leaves = tree_leaves(self.predictions)
        if not any(hasattr(leaf, "shape") or isinstance(leaf, int | float) for leaf in leaves):
            raise MetricError(
                f"the model must return an array, or several in a tuple, list or dict, got "
                f"{shape_words(self.predictions)} for {self.place}; use eval_func for other outputs"
            )
        arrays = [array for array in float_arrays(self.predictions) if array.size]
        if is_first and arrays and all(np.isnan(array).all() for array in arrays):
            raise MetricError(
                f"the outputs of the model are all NaN for {self.place} "
                f"({shape_words(self.predictions)}); check the weights and the preprocessing of "
                f"the inputs"
            )

    def postprocessed(self, postprocess: Callable[[Any], Any]) -> MetricBatch:
        """Return the batch after the user's postprocess.

        Raises:
            DataError: the return value is not a pair.
            UserCodeError: the postprocess raised.
        """
        pair = (self.predictions, self.labels)
        form = "postprocess((predictions, labels))"
        result = call_user(postprocess, pair, form=form, kind=DataError)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise DataError(
                f"postprocess must return (predictions, labels), got {shape_words(result)}"
            )
        return MetricBatch(result[0], result[1], self.place)

    def update(self, update: Callable[[Any, Any], Any], name: str) -> None:
        """Update the metric `name` with the batch, by its method `update`.

        Raises:
            MetricError: the method has another signature.
            DataError: the method raised, and predictions and labels seem not to match.
            UserCodeError: the method raised.
        """
        form = f"{name}.update(predictions, labels)"
        try:
            call_user(update, self.predictions, self.labels, form=form, kind=MetricError)
        except UserCodeError as failure:
            doubt = self._describe_mismatch() if type(failure.error) in _OF_THE_FORM else ""
            if doubt:
                raise DataError(
                    f"{self.place} {doubt}, and {name}.update raised {failure}"
                ) from failure.error
            raise

    def _describe_mismatch(self) -> str:
        """Return the signs that predictions and labels do not match, or an empty string."""
        if self.labels is None:
            return f"has labels None and predictions {shape_words(self.predictions)}"
        counts = [_sample_count(value) for value in (self.predictions, self.labels)]
        if None not in counts and counts[0] != counts[1]:
            return (
                f"has predictions {shape_words(self.predictions)} and labels "
                f"{shape_words(self.labels)}, whose numbers of samples differ"
            )
        return ""


def _sample_count(value: object) -> int | None:
    """Return the number of samples in an array; None if `value` is not an array of samples."""
    if isinstance(value, list) and value and all(isinstance(v, int | float) for v in value):
        return len(value)
    shape: Any = getattr(value, "shape", ())
    return int(shape[0]) if len(shape) else None


def _always_higher(name: str) -> bool:
    return True


@dataclass(frozen=True)
class MetricAggregation:
    """Aggregation of several metric values into one number.

    Either the weighted sum, or a score for which every metric must meet the target, each in its own
    direction. The score falls short of FP32's, which is 1, by the largest loss: 0.993 if the
    accuracy lost 0.7 % of FP32's and the F1 score less. (It exceeds 1 by that amount if the
    criterion prefers lower values.) The score meets the target if all metrics do.

    Attributes:
        names: names of the metrics, in order.
        require_all: whether every metric must meet the target.
        criterion: the criterion of each metric.
        higher: name → whether larger values are better.
        direction: likewise, for named values returned by a metric or `eval_func`.
        baseline: name → FP32's value; empty before its measurement.
    """

    names: tuple[str, ...] = ()
    require_all: bool = False
    criterion: AccuracyCriterion = AccuracyCriterion()
    higher: Mapping[str, bool] = field(default_factory=dict)
    direction: Callable[[str], bool] = _always_higher
    baseline: Mapping[str, float] = field(default_factory=dict)

    def with_baseline(self, values: Mapping[str, float], require_all: bool) -> MetricAggregation:
        """Return the aggregation with FP32's values, requiring each of them if `require_all`."""
        return replace(self, baseline=dict(values), require_all=self.require_all or require_all)

    def score(self, values: Mapping[str, float]) -> float:
        """Return 1 minus the largest loss; NaN if a value is not finite.

        Raises:
            MetricError: the names differ from those of FP32's values.
            ConfigurationError: the direction of a metric is unknown.
        """
        if not values:
            raise MetricError("a metric must return a number, got an empty dict")
        baseline = self.baseline or values
        if baseline.keys() != values.keys():
            raise MetricError(
                f"a metric must return the same names for all models, got {', '.join(values)}, "
                f"for FP32 {', '.join(baseline)}"
            )
        losses = [self.criterion_of(name).loss(baseline[name], values[name]) for name in values]
        if not all(map(math.isfinite, (*values.values(), *losses))):
            return math.nan
        return 1 - max(losses) if self.criterion.prefers_higher else 1 + max(losses)

    def targets(self) -> dict[str, float]:
        """Return name → the worst value accepted, for metrics with targets."""
        return {
            name: self.criterion_of(name).target(value) for name, value in self.baseline.items()
        }

    def criterion_of(self, name: str) -> AccuracyCriterion:
        """Return the criterion in the direction of a metric."""
        higher = self.higher[name] if name in self.higher else self.direction(name)
        return replace(self.criterion, higher_is_better=higher)


def as_scalar(value: Any, name: str) -> float:
    """Return the result of the metric or function `name` as a float.

    Raises:
        MetricError: the result is not a number.
    """
    if np.ma.is_masked(value):
        raise MetricError(
            f"{name} must return a number, got a masked value (numpy.ma.masked); no sample counts"
        )
    if callable(getattr(value, "item", None)):  # NumPy scalars, tensors of any framework
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise MetricError(f"{name} must return one number, got {shape_words(value)}") from None
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise MetricError(f"{name} must return a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise MetricError(
            f"{name} must return a number in the range of a float, got a larger one"
        ) from None
    except Exception as error:
        # Numbers of the user's own classes may raise anything.
        raise MetricError(
            f"{name} must return a number, got {with_article(type(value).__name__)} whose float() "
            f"raises {type(error).__name__}: {message_of(error)}"
        ) from error


def is_usable(accuracy: float) -> bool:
    """Whether an accuracy is comparable: neither NaN nor infinite."""
    return math.isfinite(accuracy)
