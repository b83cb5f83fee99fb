"""Segmentation metrics: the mean intersection over union (mIoU)."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from neural_mp.data.option_checks import check_finite_number, check_whole_number
from neural_mp.errors import ConfigurationError, MetricError
from neural_mp.metrics.base import METRICS, nothing_taken_in
from neural_mp.metrics.predictions import convert_to_array, convert_to_integers


@METRICS.register("mIoU", "mean_iou")
class MeanIoU:
    """The intersection over union, averaged over the classes that occur.

    Labels are classes of pixels, `[N, …]`. Predictions are scores with an additional class axis
    (argmax); or have the shape of the labels (a class axis of size 1 is ignored): integers are
    classes, floats are class 1 above `threshold`, else 0. Pixels of all batches are counted
    together.

    Args:
        num_classes: number of classes; None counts the classes that occur.
        ignore_index: a label to ignore, often 255, or a list of such labels.
        axis: class axis of scores: 1 for `[N, C, H, W]`, -1 for `[N, H, W, C]`.
        threshold: boundary between the classes of floats: 0.5 for probabilities, 0 for logits.

    Raises:
        ConfigurationError: an option is wrong.
    """

    running: ClassVar[bool] = True
    higher_is_better: ClassVar[bool] = True

    def __init__(
        self,
        num_classes: int | None = None,
        ignore_index: int | list[int] | None = None,
        axis: int = 1,
        threshold: float = 0.5,
    ) -> None:
        if num_classes is not None:
            num_classes = check_whole_number("mIoU: num_classes", num_classes, minimum=1)
        ignored = ignore_index if isinstance(ignore_index, list | tuple) else [ignore_index]
        self.num_classes = num_classes
        self.ignored = [
            check_whole_number("mIoU: ignore_index", i) for i in ignored if i is not None
        ]
        self.axis = check_whole_number("mIoU: axis", axis)
        if axis == 0:
            raise ConfigurationError("mIoU: axis must not be 0, the axis of the samples, got 0")
        self.threshold = check_finite_number("mIoU: threshold", threshold)
        self.reset()

    def reset(self) -> None:
        """Discard all counts."""
        self._confusion = np.zeros((self.num_classes or 0,) * 2, np.int64)
        self._scored = 0

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        truth = self._squeeze_channel_axis(convert_to_array(labels, "labels"))
        predicted, unknown = self._predict_classes(convert_to_array(preds, "predictions"), truth)
        truth = convert_to_integers(truth, "labels").reshape(-1)
        predicted = convert_to_integers(predicted, "predictions").reshape(-1)
        counted = ~np.isin(truth, self.ignored)
        truth, predicted, unknown = truth[counted], predicted[counted], unknown[counted]
        classes = self._count_classes(truth, predicted)
        predicted = np.where(unknown, (truth + 1) % max(classes, 2), predicted)
        classes = max(classes, 2) if unknown.any() else classes
        self.add(truth, predicted, classes)

    def add(self, truth: np.ndarray, predicted: np.ndarray, classes: int) -> None:
        """Add a batch of flat classes from 0 to below `classes`, int64 `[N]` each."""
        pairs = np.bincount(classes * truth + predicted, minlength=classes**2)
        self._add_confusion(pairs.reshape(classes, classes))

    def merge(self, other: MeanIoU) -> None:
        """Add the counts of another mIoU."""
        self._add_confusion(other._confusion)
        self._scored = other._scored or self._scored

    def _add_confusion(self, confusion: np.ndarray) -> None:
        """Add a confusion matrix; the two matrices may differ in size."""
        size = max(len(self._confusion), len(confusion))
        previous, self._confusion = self._confusion, np.zeros((size, size), np.int64)
        for counts in (previous, confusion):
            self._confusion[: len(counts), : len(counts)] += counts

    def result(self) -> float:
        """Return the mean since the last reset, 0 to 1."""
        intersection = np.diag(self._confusion)
        union = self._confusion.sum(axis=0) + self._confusion.sum(axis=1) - intersection
        present = union > 0
        if not present.any():
            raise nothing_taken_in(self)
        return float((intersection[present] / union[present]).mean())

    def _squeeze_channel_axis(self, values: np.ndarray) -> np.ndarray:
        has_channel = -values.ndim < self.axis < values.ndim and values.ndim > 3
        return values.squeeze(self.axis) if has_channel and values.shape[self.axis] == 1 else values

    def _predict_classes(
        self, scores: np.ndarray, truth: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return predicted classes, and a mask of NaN predictions, which always count as wrong."""
        shape = scores.shape
        unknown = np.isnan(scores) if scores.dtype.kind == "f" else np.zeros(scores.shape, bool)
        if scores.ndim == truth.ndim + 1 and -scores.ndim <= self.axis < scores.ndim:
            if scores.shape[self.axis] > 1:
                self._scored = scores.shape[self.axis]
                scores, unknown = scores.argmax(self.axis), unknown.any(self.axis)
            else:
                scores, unknown = scores.squeeze(self.axis), unknown.squeeze(self.axis)
                scores = self._apply_threshold(scores)
        else:
            scores, unknown = (
                self._squeeze_channel_axis(scores),
                self._squeeze_channel_axis(unknown),
            )
            scores = self._apply_threshold(scores)
        if scores.shape != truth.shape:
            raise MetricError(
                f"mIoU needs scores with an axis of classes, or classes, for labels of shape "
                f"{truth.shape}, got predictions of shape {shape}; set axis to the axis of the "
                f"classes (now {self.axis})"
            )
        return scores, unknown.reshape(-1)

    def _apply_threshold(self, scores: np.ndarray) -> np.ndarray:
        if scores.dtype.kind != "f":
            return scores
        with np.errstate(invalid="ignore"):
            return (scores > self.threshold).astype(np.int64)

    def _count_classes(self, truth: np.ndarray, predicted: np.ndarray) -> int:
        """Return the number of classes, configured or observed.

        Raises:
            MetricError: a class is out of range.
        """
        sizes = [int(values.max()) + 1 for values in (truth, predicted) if values.size]
        classes = self.num_classes or self._scored or max(*sizes, len(self._confusion), 0, 0)
        for values, what in ((truth, "labels"), (predicted, "predictions")):
            if values.size and not 0 <= values.min() <= values.max() < classes:
                wrong = values.min() if values.min() < 0 else values.max()
                hint = (
                    "; set ignore_index to labels that are not classes" if what == "labels" else ""
                )
                raise MetricError(
                    f"mIoU over {classes} classes needs {what} from 0 to {classes - 1}, got "
                    f"{wrong}{hint}"
                )
        return classes
