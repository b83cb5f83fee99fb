"""A model's accuracy on the user's data, by the user's metric."""

from __future__ import annotations

import math
import numbers
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from neural_mp.adaptors.base import Adaptor, Model
from neural_mp.common import Metric
from neural_mp.errors import MetricError
from neural_mp.tuning.data import Batches


class TimeUpError(Exception):
    """The time limit passed; caught by the tuner, never seen by users."""


class UserCodeError(Exception):
    """The user's metric, evaluation function or data raised; `__cause__` is what it raised."""


@dataclass
class Deadline:
    """A moment after which work stops at the next batch."""

    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise `TimeUpError` if the time is up; zero seconds set no limit."""
        if self.seconds and time.monotonic() - self.started > self.seconds:
            raise TimeUpError


@dataclass
class Evaluator:
    """Evaluates models and counts how often it did.

    Attributes:
        adaptor: runs the models.
        batches: the evaluation data; None where `eval_func` brings its own.
        metrics: metrics with their weights; the accuracy is their weighted sum.
        eval_func: native model → float; used instead of data and metrics.
        postprocess: applied to `(predictions, labels)` before the metrics.
        on_batch: called after every batch, for progress.
        evaluations: full passes made so far.
    """

    adaptor: Adaptor
    batches: Batches | None = None
    metrics: Sequence[tuple[Metric, float]] = ()
    eval_func: Callable[[Any], float] | None = None
    postprocess: Callable[[Any], Any] | None = None
    on_batch: Callable[[], None] = lambda: None
    evaluations: int = 0

    @property
    def available(self) -> bool:
        """Whether accuracy can be evaluated at all."""
        return self.eval_func is not None or (self.batches is not None and bool(self.metrics))

    @property
    def batch_count(self) -> int | None:
        """Batches in one pass; None where that is not known."""
        return None if self.batches is None else len(self.batches) or None

    def __call__(self, model: Model, deadline: Deadline) -> float:
        """The accuracy of a model; may be NaN.

        Raises:
            TimeUpError: the deadline passed before the data ended.
            UserCodeError: the user's own code raised.
            MetricError: the metric's result is no number.
        """
        deadline.check()
        if self.eval_func is not None:
            value = self._users(self.eval_func, self.adaptor.native(model))
            result = _number(value, "eval_func")
        else:
            result = self._over_batches(model, deadline)
        self.evaluations += 1
        return result

    def _over_batches(self, model: Model, deadline: Deadline) -> float:
        assert self.batches is not None
        for metric, _ in self.metrics:
            self._users(metric.reset)
        pairs = self.batches.pairs()
        while True:
            pair = self._users(next, pairs, None)
            if pair is None:
                break
            inputs, labels = pair
            predictions = self.adaptor.predict(model, inputs)
            if self.postprocess is not None:
                predictions, labels = self._users(self.postprocess, (predictions, labels))
            for metric, _ in self.metrics:
                self._users(metric.update, predictions, labels)
            self.on_batch()
            deadline.check()
        return sum(
            weight * _number(self._users(metric.result), type(metric).__name__)
            for metric, weight in self.metrics
        )

    @staticmethod
    def _users(call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return call(*arguments)
        except Exception as error:
            raise UserCodeError(f"{type(error).__name__}: {error}") from error


def _number(value: Any, name: str) -> float:
    if callable(getattr(value, "item", None)):  # numpy scalars, tensors of any framework
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise MetricError(f"{name} must return one number: {error}") from None
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise MetricError(f"{name} must return a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise MetricError(f"{name} must return a number that fits a float") from None


def is_usable(accuracy: float) -> bool:
    """Whether an accuracy can be compared: neither NaN nor infinite."""
    return math.isfinite(accuracy)
