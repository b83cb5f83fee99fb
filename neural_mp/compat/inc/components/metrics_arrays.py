"""Metrics of Intel Neural Compressor (INC) over classes and numbers.

Provides topk, Accuracy, ROC, F1 and mIOU, and Loss, MAE, MSE and RMSE.

Source of the definitions: `neural_compressor/experimental/metric/metric.py` and `f1.py` of
release 1.14.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, ClassVar

import numpy as np

from neural_mp.compat.inc.components.registries import (
    METRICS,
    register_for,
    split_parts,
    stack_as_one,
)
from neural_mp.data.option_checks import check_one_of, check_whole_number, true_or_false
from neural_mp.errors import MetricError
from neural_mp.metrics import regression
from neural_mp.metrics.base import RunningMean, nothing_taken_in
from neural_mp.metrics.predictions import (
    convert_number_pairs,
    convert_to_array,
    convert_to_integers,
)
from neural_mp.metrics.segmentation import MeanIoU
from neural_mp.metrics.texts import compute_token_f1
from neural_mp.util.pytree import convert_to_numpy


@register_for(METRICS, "topk")
class TopK(RunningMean):
    """Fraction of samples whose label is among the `k` highest scores; 0 before any sample.

    Scores are `[N, …]`, flattened to `[N, C]`, or `[C]` for one sample. Labels are classes, `[N]`,
    `[N, 1]` or one number, or one-hot `[N, C]`. NaN ranks above all numbers, as in numpy's sort.
    Among equal scores the last ranks highest; in INC, the order depends on the processor. An
    invalid class counts as missed.

    Args:
        k: number of highest scores.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        self.k = check_whole_number("topk: k", k, minimum=1)

    def update(self, preds: object, labels: object, sample_weight: object = None) -> None:
        """Update with one batch."""
        scores = stack_as_one(preds, "predictions")
        scores = scores.reshape(len(scores) if scores.ndim > 1 else 1, -1)
        truth = np.atleast_1d(stack_as_one(labels, "labels"))
        if isinstance(labels, list) and labels and isinstance(labels[0], tuple):
            truth = truth.reshape(truth.shape[-1], -1)  # [(first, second, …)]
        if len(truth) != len(scores):
            raise MetricError(
                f"topk: labels must be a label for each row of scores, got shape {truth.shape} for "
                f"scores of shape {scores.shape}"
            )
        truth = truth.reshape(len(truth), -1)
        if truth.shape[1] != 1:
            truth = np.argsort(truth, axis=1, kind="stable")[:, -1:]
        self.take_in(self._is_in_top(scores, convert_to_integers(truth, "labels")))

    def result(self) -> float:
        """Return the fraction since the last reset."""
        return super().result() if self._count else 0.0

    def _is_in_top(self, scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
        """Return whether each row `[C]` of scores ranks the label `[1]` among its best; `[N]`."""
        best = np.argsort(scores, axis=1, kind="stable")[:, -self.k :]
        return (best == truth).any(axis=1)


@register_for(METRICS, "topk", "tensorflow")
class TensorFlowTopK(TopK):
    """`topk` by the rule of TensorFlow's `in_top_k`, with float32 scores; 0 before any sample.

    A label is missed if at least `k` scores are strictly higher than its score, so a model with
    only equal scores is always right. A label is also missed if a score is not finite or the
    class is invalid.
    """

    def _is_in_top(self, scores: np.ndarray, truth: np.ndarray) -> np.ndarray:
        scores = scores.astype(np.float32)
        is_class = (truth >= 0) & (truth < scores.shape[1])
        of_truth = np.take_along_axis(scores, np.where(is_class, truth, 0), axis=1)
        higher = (scores > of_truth).sum(axis=1)
        return (higher < self.k) & is_class[:, 0] & np.isfinite(scores).all(axis=1)


@register_for(METRICS, "Accuracy")
class Accuracy(RunningMean):
    """Number of correct predictions per sample.

    * Scores `[N, C, …]` of several classes and labels `[N, …]`: the highest score counts, the
      first of equal scores. Correct predictions along further axes are added up, as in INC, so
      that the value of images `[N, C, H, W]` reaches H·W.
    * Predictions and labels of equal shape `[N, C, …]`: fraction of equal numbers.
    * Predictions `[N]`, `[N, 1]` or `[N, 1, …]` and as many labels: equal numbers per sample, with
      no threshold on scores.

    INC compares each of the predictions `[N, 1]` with all labels `[N]`; here, each is compared
    with its own label.
    """

    higher_is_better: ClassVar[bool] = True

    def __init__(self) -> None:
        super().__init__()
        self._most = 0.0

    @property
    def best_value(self) -> float | None:  # type: ignore[override]
        """Upper bound of the value; None before the first batch."""
        return self._most or None

    def update(self, preds: object, labels: object, sample_weight: object = None) -> None:
        """Update with one batch."""
        scores = np.atleast_1d(stack_as_one(preds, "predictions"))
        truth = np.atleast_1d(stack_as_one(labels, "labels"))
        if scores.ndim == truth.ndim + 1:
            predicted = scores[:, 0] if scores.shape[1] == 1 else scores.argmax(axis=1)
        else:
            predicted = scores
        if predicted.shape != truth.shape:
            raise MetricError(
                f"Accuracy: predictions must be [N, …] or scores [N, C, …] for labels [N, …], "
                f"got predictions of shape {scores.shape} and labels of shape {truth.shape}"
            )
        are_many_labels = predicted is scores and truth.ndim > 1 and truth.shape[1] > 1
        count = truth.size if are_many_labels else len(truth)
        self._sum += float((predicted == truth).sum())
        self._count += count
        self._most = max(self._most, truth.size / max(count, 1))

    def merge(self, other: Any) -> None:
        """Add the state of another instance."""
        super().merge(other)
        self._most = max(self._most, other._most)


@register_for(METRICS, "ROC")
class ROC(RunningMean):
    """Fraction of samples whose rounded score equals the label: an accuracy, as in INC.

    Despite the name, not the area under the curve. Scores and labels are `[N]`, `[N, 1]` or
    `[1, N]`, scores from 0 to 1; 0.5 is rounded to 0.

    Args:
        task: `dlrm`, `dien` or `wide_deep`, with identical results.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, task: str = "dlrm") -> None:
        super().__init__()
        self.task = check_one_of("ROC: task", task, ("dlrm", "dien", "wide_deep"))

    def update(self, preds: object, labels: object) -> None:
        """Update with one batch."""
        scores = np.atleast_1d(np.squeeze(stack_as_one(preds, "predictions")))
        truth = np.atleast_1d(np.squeeze(stack_as_one(labels, "labels")))
        if scores.ndim != 1 or scores.shape != truth.shape:
            raise MetricError(
                f"ROC: scores and labels must hold one number for each sample, got scores of shape "
                f"{scores.shape} and labels of shape {truth.shape}"
            )
        self.take_in(np.round(scores) == truth)


@register_for(METRICS, "F1")
class F1:
    """F1 score between two lists of tokens, averaged over batches.

    Predictions and labels of a batch are one list each, of words, numbers or other values, of any
    lengths. Precision is the fraction of predictions found among the labels, recall the fraction
    of labels found among the predictions; order is ignored. Answers to questions (SQuAD) are
    compared in this way; the F1 score of classes is `f1_score`.
    """

    running: ClassVar[bool] = False  # a mean over batches of any size
    higher_is_better: ClassVar[bool] = True

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Reset the state."""
        self._scores: list[float] = []

    def update(self, preds: object, labels: object) -> None:
        """Update with one batch."""
        self._scores.append(
            compute_token_f1(_to_tokens(preds, "predictions"), _to_tokens(labels, "labels"))
        )

    def merge(self, other: F1) -> None:
        """Append the state of another instance."""
        self._scores += other._scores

    def result(self) -> float:
        """Return the mean over batches since the last reset, 0 to 1."""
        if not self._scores:
            raise nothing_taken_in(self)
        return float(np.mean(self._scores))


def _to_tokens(values: object, what: str) -> Sequence[Hashable]:
    pieces = split_parts(values)
    values = pieces[0] if len(pieces) == 1 else values
    if hasattr(values, "shape"):
        array = convert_to_numpy(values)
        values = array.tolist() if array.ndim == 1 else None
    if not isinstance(values, Sequence) or not all(isinstance(v, Hashable) for v in values):
        raise MetricError(
            f"F1: {what} must be one list of words or numbers, got {type(values).__name__}; for "
            f"classes, name f1_score instead"
        )
    return values


@register_for(METRICS, "mIOU")
class MeanIntersectionOverUnion(MeanIoU):
    """Mean intersection over union of the classes that occur.

    Predictions and labels are classes of pixels, of any shapes of equal size. Pixels with an
    invalid label, e.g. 255, are ignored.

    Args:
        num_classes: number of classes.
    """

    def __init__(self, num_classes: int = 21) -> None:
        super().__init__(check_whole_number("mIOU: num_classes", num_classes, minimum=1))
        self._classes = num_classes

    def update(self, preds: object, labels: object) -> None:
        """Update with one batch."""
        predicted = convert_to_integers(stack_as_one(preds, "predictions"), "predictions").reshape(
            -1
        )
        truth = convert_to_integers(stack_as_one(labels, "labels"), "labels").reshape(-1)
        if predicted.shape != truth.shape:
            raise MetricError(
                f"mIOU: predictions must hold a prediction for each pixel of the labels, got "
                f"{predicted.size} predictions and {truth.size} labels"
            )
        valid = (truth >= 0) & (truth < self._classes)
        predicted, truth = predicted[valid], truth[valid]
        if predicted.size and not 0 <= predicted.min() <= predicted.max() < self._classes:
            raise MetricError(
                f"mIOU: with num_classes={self._classes}, predictions must be classes from 0 to "
                f"{self._classes - 1}, got {predicted.min()} to {predicted.max()}; convert scores "
                f"to classes in the model or a postprocess transform"
            )
        self.add(truth, predicted, self._classes)


class _OutputByOutput(RunningMean):
    """Mixin that passes each of several outputs to a metric for one output."""

    def __init__(self, compare_label: bool = True) -> None:
        super().__init__()
        name = f"{type(self).__name__}: compare_label"
        self.compare_label = true_or_false(name, compare_label)

    def update(self, preds: object, labels: object, sample_weight: object = None) -> None:
        """Update with one batch."""
        for predicted, truth in _pair_arrays(preds, labels):
            super().update(predicted, truth)  # type: ignore[misc]


@register_for(METRICS, "MAE")
class MAE(_OutputByOutput, regression.MAE):
    """Mean absolute error over all numbers of all outputs.

    Unsigned integers are compared by value; in INC, their differences wrap around.

    Args:
        compare_label: whether predictions are compared with the labels, else with the
            predictions of the FP32 model.
    """


@register_for(METRICS, "MSE")
class MSE(_OutputByOutput, regression.MSE):
    """Mean squared error over all numbers of all outputs; options of `MAE`."""


@register_for(METRICS, "RMSE")
class RMSE(_OutputByOutput, regression.RMSE):
    """Square root of `MSE`; options of `MAE`."""


@register_for(METRICS, "Loss")
class Loss(RunningMean):
    """Mean of predictions that are losses; labels only determine the number of samples.

    The sum over all numbers of all outputs is divided by the length of the first output in a
    list. As in INC, an array `[N, M]` outside a list counts as a list of its N rows: its sum is
    divided by M. The result is N times the mean over samples, for FP32 and all other models
    alike.
    """

    running: ClassVar[bool] = False  # the divisor need not be the number of samples
    higher_is_better: ClassVar[bool] = False

    def update(self, preds: object, labels: object, sample_weight: object = None) -> None:
        """Update with one batch."""
        self._sum += float(sum(predicted.sum() for predicted, _ in _pair_arrays(preds, labels)))
        first = split_parts(labels)[0]
        array = np.atleast_1d(convert_to_array(first, "labels"))
        is_list_of_rows = first is labels and array.ndim > 1
        self._count += array.shape[1] if is_list_of_rows else len(array)


def _pair_arrays(preds: object, labels: object) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return predictions and labels of each output as float64 arrays of equal shape."""
    predicted, truth = split_parts(preds), split_parts(labels)
    if len(predicted) != len(truth):  # one side may be a list of rows of one array
        predicted, truth = [stack_as_one(preds, "predictions")], [stack_as_one(labels, "labels")]
    return [convert_number_pairs(*pair) for pair in zip(predicted, truth, strict=True)]
