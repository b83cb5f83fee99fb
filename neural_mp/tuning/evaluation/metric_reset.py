"""Check that `reset` clears a metric: one that remembers mixes the models that it evaluates."""

from __future__ import annotations

import copy
import logging
import math
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any, TypeAlias

from neural_mp.common import Metric
from neural_mp.errors import DataError, MetricError
from neural_mp.tuning.evaluation.metric_values import MetricBatch, as_scalar
from neural_mp.util.digest import digest_of
from neural_mp.util.user_calls import UserCodeError, call_user

logger = logging.getLogger(__name__)

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

    def cleared(self, metrics: Metrics) -> None:
        """Handle a reset of all metrics."""
        if self._is_done:
            return
        states = [_metric_state(metric) for metric, _ in metrics]
        if not self._changed:
            self._clear = states
            return
        self.suspects = tuple(
            index
            for index, changed in enumerate(self._changed)
            if any(self._clear[index].get(name) != states[index].get(name) for name in changed)
        )
        self._clear, self._changed, self._is_done = [], [], True

    def updated(self, metrics: Metrics) -> None:
        """Handle the first update of all metrics after a reset."""
        if self._is_done:
            return
        states = [_metric_state(metric) for metric, _ in metrics]
        self._changed = [
            frozenset(name for name, value in current.items() if cleared.get(name) != value)
            for cleared, current in zip(self._clear, states, strict=True)
        ]


def _metric_state(metric: Metric) -> State:
    """Return attribute → comparable state, of a metric and of the classes of the user's code."""
    room = [_MOST_VALUES]
    state: State = {}
    for kind in reversed(type(metric).__mro__):
        if kind is not object:
            state |= {name: _summarize_value(value, room) for name, value in vars(kind).items()}
    own = getattr(metric, "__dict__", {})
    return state | {name: _summarize_value(value, room) for name, value in own.items()}


def _summarize_value(value: Any, room: list[int], depth: int = 0) -> Hashable:
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
        return digest_of(value) if _is_small(value) else repr(value.shape)
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
        if not _are_values_close(first, _metric_result(metric, name)):
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
    return _metric_result(metric, name)


def _update_metric(metric: Metric, name: str, batch: MetricBatch) -> None:
    try:
        # An update may change its arguments in place.
        predictions, labels = copy.deepcopy((batch.predictions, batch.labels))
    except Exception as error:
        # Tensors of frameworks and user classes may refuse copies with any error.
        raise DataError(f"{batch.place} cannot be copied") from error
    replace(batch, predictions=predictions, labels=labels).update(metric.update, name)


def _metric_result(metric: Metric, name: str) -> Values:
    result = call_user(metric.result)
    values: Mapping[str, Any] = result if isinstance(result, Mapping) else {"": result}
    return {key: as_scalar(value, name) for key, value in values.items()}


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
