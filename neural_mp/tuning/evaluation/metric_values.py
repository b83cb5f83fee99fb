"""Checks of metrics and of what they receive, and aggregation of metric values."""

from __future__ import annotations

import copy
import logging
import math
import numbers
from collections import deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any, TypeAlias

import numpy as np

from neural_mp.common import Metric
from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.errors import DataError, MetricError, message_of
from neural_mp.util.batch_cache import copy_batch
from neural_mp.util.fingerprint import compute_data_digest
from neural_mp.util.pytree import list_float_arrays, tree_leaves
from neural_mp.util.text import describe_value_shape, with_article
from neural_mp.util.user_calls import UserCodeError, call_user

logger = logging.getLogger(__name__)

#: Python's and NumPy's errors for malformed values; user-defined classes are more specific.
_OF_THE_FORM = (TypeError, ValueError, IndexError, AttributeError, KeyError)


@dataclass(frozen=True)
class MetricBatch:
    """A batch with the predictions of a model; `place` is its number and loader, as text."""

    predictions: Any
    labels: Any
    place: str

    def check_values(self, is_first: bool) -> None:
        """Check that predictions hold usable numbers; of values only if `is_first`.

        Raises:
            MetricError: the model returns no numbers, or only NaN.
        """
        leaves = tree_leaves(self.predictions)
        if not any(hasattr(leaf, "shape") or isinstance(leaf, int | float) for leaf in leaves):
            raise MetricError(
                f"the model must return an array, or several in a tuple, list or dict, got "
                f"{describe_value_shape(self.predictions)} for {self.place}; use eval_func for "
                "other outputs"
            )
        arrays = [array for array in list_float_arrays(self.predictions) if array.size]
        if is_first and arrays and all(np.isnan(array).all() for array in arrays):
            raise MetricError(
                f"the outputs of the model are all NaN for {self.place} "
                f"({describe_value_shape(self.predictions)}); check the weights and the "
                "preprocessing of the inputs"
            )

    def apply_postprocess(self, postprocess: Callable[[Any], Any]) -> MetricBatch:
        """Return the batch after the user's postprocess.

        Raises:
            DataError: the return value is not a pair.
            UserCodeError: the postprocess raised.
        """
        pair = (self.predictions, copy_batch(self.labels))
        form = "postprocess((predictions, labels))"
        result = call_user(postprocess, pair, form=form, kind=DataError)
        if not isinstance(result, tuple | list) or len(result) != 2:
            raise DataError(
                f"postprocess must return (predictions, labels), got {describe_value_shape(result)}"
            )
        return MetricBatch(result[0], result[1], self.place)

    def update_metric(self, update: Callable[[Any, Any], Any], name: str) -> None:
        """Update the metric `name` with the batch, by its method `update`.

        The metric may edit its labels, e.g. those to ignore: later passes read the original ones.

        Raises:
            MetricError: the method has another signature.
            DataError: the method raised, and predictions and labels seem not to match.
            UserCodeError: the method raised.
        """
        form = f"{name}.update(predictions, labels)"
        try:
            labels = copy_batch(self.labels)
            call_user(update, self.predictions, labels, form=form, kind=MetricError)
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
            return f"has labels None and predictions {describe_value_shape(self.predictions)}"
        counts = [_sample_count(value) for value in (self.predictions, self.labels)]
        if None not in counts and counts[0] != counts[1]:
            return (
                f"has predictions {describe_value_shape(self.predictions)} and labels "
                f"{describe_value_shape(self.labels)}, whose numbers of samples differ"
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

    def aggregate_score(self, values: Mapping[str, float]) -> float:
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
        losses = [
            self.get_metric_criterion(name).loss(baseline[name], values[name]) for name in values
        ]
        if not all(map(math.isfinite, (*values.values(), *losses))):
            return math.nan
        return 1 - max(losses) if self.criterion.prefers_higher else 1 + max(losses)

    def metric_targets(self) -> dict[str, float]:
        """Return name → the worst value accepted, for metrics with targets."""
        return {n: self.get_metric_criterion(n).target(v) for n, v in self.baseline.items()}

    def get_metric_criterion(self, name: str) -> AccuracyCriterion:
        """Return the criterion in the direction of a metric."""
        higher = self.higher[name] if name in self.higher else self.direction(name)
        return replace(self.criterion, higher_is_better=higher)


def convert_to_scalar(value: Any, name: str) -> float:
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
            raise MetricError(
                f"{name} must return one number, got {describe_value_shape(value)}"
            ) from None
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


#: Relative difference of two results above which they differ: the rounding of sums.
_ROUNDING = 1e-9
#: Limits of the state that is compared: values, elements of a list, nesting, characters, elements.
_MOST_VALUES, _MOST_PARTS, _MOST_DEPTH, _MOST_CHARACTERS, _MOST_ELEMENTS = (
    5000,
    100,
    6,
    500,
    1 << 20,
)
Values = dict[str, float]
State = dict[str, Hashable]
Metrics: TypeAlias = Sequence[tuple[Metric, float]]


class ResetWatch:
    """Compares the states of metrics after two resets, without calls of the metrics.

    A metric that counts what `update` changes, and whose `reset` restores the changed attributes,
    is clear. All other metrics are suspects. A state that is not kept in attributes of the metric
    or of its class, e.g. by a library, is not seen.
    """

    def __init__(self) -> None:
        self._clear: list[State] = []
        self._changed: list[frozenset[str]] = []
        self._is_done = False
        #: Indices of metrics whose state is not restored; empty before the second reset.
        self.suspects: tuple[int, ...] = ()

    def handle_reset(self, metrics: Metrics) -> None:
        """Handle a reset of all metrics."""
        if self._is_done:
            return
        states = [_capture_metric_state(metric) for metric, _ in metrics]
        if not self._changed:
            self._clear = states
            return
        self.suspects = tuple(
            index
            for index, changed in enumerate(self._changed)
            if any(self._clear[index].get(name) != states[index].get(name) for name in changed)
        )
        self._clear, self._changed, self._is_done = [], [], True

    def handle_update(self, metrics: Metrics) -> None:
        """Handle the first update of all metrics after a reset."""
        if self._is_done:
            return
        states = [_capture_metric_state(metric) for metric, _ in metrics]
        self._changed = [
            frozenset(name for name, value in current.items() if cleared.get(name) != value)
            for cleared, current in zip(self._clear, states, strict=True)
        ]


def _capture_metric_state(metric: Metric) -> State:
    """Return attribute → comparable state, of a metric and of the classes of the user's code."""
    room = [_MOST_VALUES]
    state: State = {}
    for kind in reversed(type(metric).__mro__):
        if kind is not object:
            state |= {name: _summarize_value(value, room) for name, value in vars(kind).items()}
    own = getattr(metric, "__dict__", {})
    return state | {name: _summarize_value(value, room) for name, value in own.items()}


def _summarize_value(value: object, room: list[int], depth: int = 0) -> Hashable:
    """Return a summary of a value; of large or deep values, a part."""
    room[0] -= 1
    if value is None or isinstance(value, int | float | complex | str | bytes):
        return repr(value)[:_MOST_CHARACTERS]
    if (
        room[0] < 0
        or depth > _MOST_DEPTH
        or isinstance(value, type | ModuleType)
        or callable(value)
    ):
        return type(value).__name__
    if hasattr(value, "shape") and not isinstance(value, Mapping):
        return compute_data_digest(value) if _is_small(value) else repr(value.shape)
    if isinstance(value, Mapping):
        parts: list[Any] = [*value.items()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        parts = list(value)
    else:
        parts = list(getattr(value, "__dict__", {}).items())
    summary = [_summarize_value(part, room, depth + 1) for part in parts[:_MOST_PARTS]]
    return len(parts), tuple(summary)


def _is_small(array: Any) -> bool:
    try:
        return math.prod(map(int, array.shape)) <= _MOST_ELEMENTS
    except (TypeError, ValueError):
        return False  # unknown rank


def check_reset(metric: Metric, name: str, batch: MetricBatch) -> None:
    """Check that a metric returns the same result for a batch after every `reset`.

    Between the two evaluations, the metric receives the batch with its labels in another order, so
    that a metric that remembers changes even if all predictions are right. Metrics that cannot be
    evaluated on a single batch, and metrics with random results, are not checked.

    Raises:
        MetricError: the results differ.
    """
    try:
        first = _result_after_batch(metric, name, batch)
        if not _are_values_close(first, _get_metric_result(metric, name)):
            return  # random
        _update_metric(metric, name, _rotate_labels(batch))
        again = _result_after_batch(metric, name, batch)
    except (UserCodeError, MetricError, DataError) as error:
        if isinstance(error, UserCodeError) and not isinstance(error.error, Exception):
            raise  # must end the process
        logger.debug("%s cannot be evaluated on one batch", name, exc_info=True)
        return
    if not _are_values_close(first, again):
        raise MetricError(
            f"{name}.reset() must clear the metric, got {_format_values(first)} and then "
            f"{_format_values(again)} for the same batch, each after reset(); set all counts and "
            f"sums to their initial values in reset"
        )


def _result_after_batch(metric: Metric, name: str, batch: MetricBatch) -> Values:
    call_user(metric.reset)
    _update_metric(metric, name, batch)
    return _get_metric_result(metric, name)


def _update_metric(metric: Metric, name: str, batch: MetricBatch) -> None:
    try:
        # An update may change its arguments in place.
        predictions, labels = copy.deepcopy((batch.predictions, batch.labels))
    except Exception as error:
        # Tensors of frameworks and user classes may refuse copies with any error.
        raise DataError(f"{batch.place} cannot be copied") from error
    replace(batch, predictions=predictions, labels=labels).update_metric(metric.update, name)


def _get_metric_result(metric: Metric, name: str) -> Values:
    result = call_user(metric.result)
    values: Mapping[str, Any] = result if isinstance(result, Mapping) else {"": result}
    return {key: convert_to_scalar(value, name) for key, value in values.items()}


def _rotate_labels(batch: MetricBatch) -> MetricBatch:
    """Return the batch with each label moved to the next sample, if labels can be indexed."""
    labels = batch.labels
    try:
        count = len(labels)
        moved = [*range(1, count), 0]
        labels = [labels[i] for i in moved] if isinstance(labels, list) else labels[moved]
    except Exception:
        # Mappings, and tensors without lists as indices, raise arbitrary errors.
        logger.debug("the labels of %s cannot be reordered", batch.place, exc_info=True)
        return batch
    return replace(batch, labels=labels)


def _are_values_close(first: Values, second: Values) -> bool:
    """Whether two results are equal up to rounding; NaN equals NaN."""
    return first.keys() == second.keys() and all(
        math.isclose(value, second[name], rel_tol=_ROUNDING, abs_tol=_ROUNDING)
        or (math.isnan(value) and math.isnan(second[name]))
        for name, value in first.items()
    )


def _format_values(values: Values) -> str:
    return ", ".join(f"{name} {value:.6g}".strip() for name, value in values.items())
