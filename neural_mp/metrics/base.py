"""Registry of metrics, and base classes that accumulate batches.

`update` of a built-in metric raises MetricError if predictions and labels do not fit each other or
earlier batches, `merge` if the batches do not fit, and `result` if there are no samples.
"""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from neural_mp.data.registry import Registry
from neural_mp.errors import MetricError

#: Entry-point group of third-party metrics.
ENTRY_POINT_GROUP = "neural_mp.metrics"
METRICS = Registry("metric", group=ENTRY_POINT_GROUP)


class RunningMean:
    """A mean over all values, held as a sum and a count.

    Attributes:
        running: whether `result` may be called between batches, for early stopping of an
            evaluation.
        best_value: the best possible value; None if unbounded.
    """

    running: ClassVar[bool] = True
    best_value: ClassVar[float | None] = None

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all values."""
        self._sum = 0.0
        self._count = 0

    def result(self) -> float:
        """Return the mean since the last reset; NaN if a prediction was NaN."""
        if self._count == 0:
            raise nothing_taken_in(self)
        return self._sum / self._count

    def take_in(self, values: np.ndarray) -> None:
        """Add values to the mean."""
        self._sum += float(np.sum(values, dtype=np.float64))
        self._count += values.size

    def merge(self, other: RunningMean) -> None:
        """Add the values of another instance."""
        self._sum += other._sum
        self._count += other._count


class Collection:
    """All predictions and labels, for metrics that need the whole data at once."""

    running: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Discard all batches."""
        self._preds: list[np.ndarray] = []
        self._labels: list[np.ndarray] = []

    def take_in(self, preds: np.ndarray, labels: np.ndarray) -> None:
        """Store one batch."""
        self._check_shape(preds)
        # A copy: frameworks reuse the memory behind what they return.
        self._preds.append(preds.copy())
        self._labels.append(labels.copy())

    def merge(self, other: Collection) -> None:
        """Append the batches of another instance."""
        if other._preds:
            self._check_shape(other._preds[0])
        self._preds += other._preds
        self._labels += other._labels

    def _check_shape(self, preds: np.ndarray) -> None:
        if self._preds and self._preds[0].shape[1:] != preds.shape[1:]:
            raise MetricError(
                f"predictions must have the shape of earlier batches, {self._preds[0].shape}, "
                f"except for the first axis, got {preds.shape}"
            )

    def concatenate_batches(self) -> tuple[np.ndarray, np.ndarray]:
        """Return all predictions and all labels since the last reset."""
        if not any(len(batch) for batch in self._preds):
            raise nothing_taken_in(self)
        return np.concatenate(self._preds), np.concatenate(self._labels)


def nothing_taken_in(metric: object) -> MetricError:
    """Return the error for a result without samples."""
    return MetricError(
        f"{type(metric).__name__} has no result before the first sample; is the dataloader empty?"
    )
