"""The registry of metrics, and the two ways in which they collect what they see."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from neural_mp.data.registry import Registry
from neural_mp.errors import MetricError

METRICS = Registry("metric")


class RunningMean:
    """A mean over everything taken in, held as a sum and a count.

    Attributes:
        running: whether `result` may be asked for in between, too, to stop an evaluation that is
            lost.
        best_value: what no sample can better; None where there is no such value.
    """

    running: ClassVar[bool] = True
    best_value: ClassVar[float | None] = None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._sum = 0.0
        self._count = 0

    def result(self) -> float:
        """The mean since the last reset; NaN where a prediction was NaN.

        Raises:
            MetricError: nothing has been taken in.
        """
        if self._count == 0:
            raise nothing_taken_in(self)
        return self._sum / self._count

    def take_in(self, values: np.ndarray) -> None:
        """Add values to the mean."""
        self._sum += float(np.sum(values, dtype=np.float64))
        self._count += values.size

    def merge(self, other: RunningMean) -> None:
        """Take in all that another of its kind has taken in."""
        self._sum += other._sum
        self._count += other._count


class Collection:
    """Predictions and labels kept whole, for metrics that need all of them at once."""

    running: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything."""
        self._preds: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

    def take_in(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Keep one batch.

        Raises:
            MetricError: its samples have another shape than those before.
        """
        self._check_shape(preds)
        # A copy: frameworks reuse the memory behind what they return.
        self._preds.append(preds.copy())
        self._labels.append(labels.copy())

    def merge(self, other: Collection) -> None:
        """Take in all that another of its kind has taken in, after what is here.

        Raises:
            MetricError: its samples have another shape.
        """
        if other._preds:
            self._check_shape(other._preds[0])
        self._preds += other._preds
        self._labels += other._labels

    def _check_shape(self, preds: np.ndarray) -> None:
        if self._preds and self._preds[0].shape[1:] != preds.shape[1:]:
            raise MetricError(
                f"predictions of shape {preds.shape} do not fit those of shape "
                f"{self._preds[0].shape} in an earlier batch"
            )

    def collected(self) -> tuple[np.ndarray, np.ndarray]:
        """All predictions and all labels since the last reset.

        Raises:
            MetricError: nothing has been taken in.
        """
        if not any(len(batch) for batch in self._preds):
            raise nothing_taken_in(self)
        return np.concatenate(self._preds), np.concatenate(self._labels)


def nothing_taken_in(metric: object) -> MetricError:
    """The error of a result that is asked for too early."""
    return MetricError(
        f"{type(metric).__name__} has no result before update has taken in a sample; "
        f"is the dataloader empty?"
    )
