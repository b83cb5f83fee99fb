"""Classification metrics: accuracy, topk, F1, AUC and the cross-entropy loss.

Labels are classes from 0, `[N]` or `[N, 1]`, or one-hot `[N, C]`. Predictions are scores
`[N, C]`, scores `[N]` or `[N, 1]` of class 1 against class 0, or, if a metric documents it,
classes.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from neural_mp.data.option_checks import (
    check_finite_number,
    check_one_of,
    check_whole_number,
    true_or_false,
)
from neural_mp.errors import MetricError
from neural_mp.metrics.base import METRICS, Collection, RunningMean
from neural_mp.metrics.predictions import (
    are_probabilities,
    convert_class_pairs,
    log_softmax,
    score_pairs,
)


@METRICS.register("accuracy", "acc")
class Accuracy(RunningMean):
    """The fraction of samples whose predicted class equals the label.

    Predictions are scores `[N, C]` (argmax), floats `[N]` (class 1 above `threshold`, else 0),
    or integers `[N]` (classes).

    Args:
        threshold: boundary between the classes of floats `[N]`: 0.5 for probabilities, 0 for
            logits.

    Raises:
        ConfigurationError: `threshold` is not a number.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, threshold: float = 0.5) -> None:
        super().__init__()
        self.threshold = check_finite_number("accuracy: threshold", threshold)

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        predicted, truth = convert_class_pairs(preds, labels, self.threshold)
        self.take_in(predicted == truth)


@METRICS.register("topk")
class TopK(RunningMean):
    """The fraction of samples whose label is among the `k` highest scores `[N, C]`.

    Of equal scores the first counts as higher, as in accuracy.

    Args:
        k: number of top classes.

    Raises:
        ConfigurationError: `k` is not a whole number from 1.
    """

    higher_is_better: ClassVar[bool] = True
    best_value: ClassVar[float | None] = 1.0

    def __init__(self, k: int = 1) -> None:
        super().__init__()
        self.k = check_whole_number("topk: k", k, minimum=1)

    def update(self, preds: object, labels: object) -> None:
        """Add one batch.

        Raises:
            MetricError: predictions are not `[N, C]` with C from `k`, or do not fit the labels.
        """
        scores, truth = score_pairs(preds, labels)
        if scores.ndim != 2 or scores.shape[1] < self.k:
            raise MetricError(
                f"topk with k={self.k} needs predictions [N, C] of at least {self.k} classes, "
                f"got predictions of shape {scores.shape} and labels of shape {truth.shape}"
            )
        of_truth = np.take_along_axis(scores, truth[:, np.newaxis], axis=1)
        earlier = np.arange(scores.shape[1]) < truth[:, np.newaxis]
        ahead = (scores > of_truth) | ((scores == of_truth) & earlier)
        unknown = np.isnan(scores).any(axis=1) if scores.dtype.kind == "f" else False
        self.take_in((ahead.sum(axis=1) < self.k) & ~np.asarray(unknown))


@METRICS.register("F1", "f1_score")
class F1(Collection):
    """The F1 score, scikit-learn's `f1_score`, with predictions as in `Accuracy`.

    Args:
        average: `binary` (of class 1), `macro`, `micro` or `weighted`; default: `binary` if there
            are only classes 0 and 1, else `macro`.
        threshold: boundary between the classes of floats `[N]`: 0.5 for probabilities, 0 for
            logits.

    Raises:
        ConfigurationError: an option is wrong.
    """

    higher_is_better: ClassVar[bool] = True

    def __init__(self, average: str | None = None, threshold: float = 0.5) -> None:
        super().__init__()
        if average is not None:
            check_one_of("F1: average", average, ("binary", "macro", "micro", "weighted"))
        self.average = average
        self.threshold = check_finite_number("F1: threshold", threshold)

    def reset(self) -> None:
        """Discard all batches."""
        super().reset()
        self._two_classes = True

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        scores, _ = score_pairs(preds, labels)
        predicted, truth = convert_class_pairs(preds, labels, self.threshold)
        self._two_classes &= scores.ndim == 1 or scores.shape[1] == 2
        self._two_classes &= bool(np.isin(predicted, (0, 1)).all() and np.isin(truth, (0, 1)).all())
        self.take_in(predicted, truth)

    def merge(self, other: Any) -> None:
        """Append the batches of another F1."""
        super().merge(other)
        self._two_classes &= other._two_classes

    def result(self) -> float:
        """Return the score since the last reset, 0 to 1.

        Raises:
            MetricError: there are no samples, or `binary` is set with other classes.
        """
        from sklearn.metrics import f1_score

        predicted, truth = self.concatenate_batches()
        if self.average == "binary" and not self._two_classes:
            raise MetricError(
                "F1 with average 'binary' requires the classes 0 and 1, got others; "
                "set average to macro, micro or weighted"
            )
        average = self.average or ("binary" if self._two_classes else "macro")
        return float(f1_score(truth, predicted, average=average, zero_division=0))


@METRICS.register("AUC", "roc_auc", "ROC")
class AUC(Collection):
    """The area under the ROC curve, scikit-learn's `roc_auc_score`.

    Two classes: scores `[N]`, `[N, 1]` or `[N, 2]`, logits or probabilities. More classes: the
    mean over classes (`ovr`) or pairs of classes (`ovo`) of scores `[N, C]`.

    Args:
        multi_class: `ovr` (each class against the rest) or `ovo` (each against each).
        from_logits: whether scores `[N, C]` of more than two classes are logits, not
            probabilities.

    Raises:
        ConfigurationError: an option is wrong.
    """

    higher_is_better: ClassVar[bool] = True

    def __init__(self, multi_class: str = "ovr", from_logits: bool = True) -> None:
        super().__init__()
        self.multi_class = check_one_of("AUC: multi_class", multi_class, ("ovr", "ovo"))
        self.from_logits = true_or_false("AUC: from_logits", from_logits)

    def update(self, preds: object, labels: object) -> None:
        """Add one batch."""
        scores, truth = score_pairs(preds, labels)
        scores = scores.astype(np.float64)
        if scores.ndim == 2 and scores.shape[1] == 2:
            # Same ranking as the probability of class 1, for logits and probabilities.
            scores = scores[:, 1] - scores[:, 0]
        self.take_in(scores, truth)

    def result(self) -> float:
        """Return the area since the last reset, 0 to 1; NaN if a prediction was NaN.

        Raises:
            MetricError: there are no samples, or a class has no sample.
        """
        from sklearn.metrics import roc_auc_score

        scores, truth = self.concatenate_batches()
        count = 2 if scores.ndim == 1 else scores.shape[1]
        absent = sorted(set(range(count)) - set(truth.tolist()))
        if absent or truth.max() >= count or truth.min() < 0:
            raise MetricError(
                f"AUC over {count} classes needs labels of each of 0 to {count - 1} and no other, "
                f"got {np.unique(truth).tolist()}"
            )
        if np.isnan(scores).any():
            return float("nan")
        if count == 2:
            return float(roc_auc_score(truth, scores))
        if self.from_logits:
            _refuse_probabilities("AUC", bool(are_probabilities(scores).all()))
            chances = np.exp(log_softmax(scores))
        else:
            chances = _check_probabilities("AUC", scores)
        # scikit-learn requires rows that sum to exactly 1, despite rounding.
        chances = chances / chances.sum(axis=1, keepdims=True)
        return float(roc_auc_score(truth, chances, multi_class=self.multi_class))


@METRICS.register("loss", "cross_entropy", "log_loss")
class Loss(RunningMean):
    """The mean cross entropy in nats, equal to scikit-learn's `log_loss` for probabilities.

    Args:
        from_logits: whether predictions are logits, `[N, C]`, or `[N]` before a sigmoid, not
            probabilities.

    Raises:
        ConfigurationError: `from_logits` is neither true nor false.
    """

    higher_is_better: ClassVar[bool] = False
    best_value: ClassVar[float | None] = 0.0

    def __init__(self, from_logits: bool = True) -> None:
        super().__init__()
        self.from_logits = true_or_false("loss: from_logits", from_logits)

    def reset(self) -> None:
        """Discard all values."""
        super().reset()
        self._all_probabilities = True

    def update(self, preds: object, labels: object) -> None:
        """Add one batch.

        Raises:
            MetricError: predictions and labels do not fit each other, or expected probabilities
                are none.
        """
        scores, truth = score_pairs(preds, labels)
        scores = scores.astype(np.float64)
        if scores.ndim == 1:
            complement = np.zeros_like(scores) if self.from_logits else 1 - scores
            self._all_probabilities = False  # undecidable from one score per sample
            scores = np.stack([complement, scores], axis=1)
        if truth.size and not 0 <= truth.min() <= truth.max() < scores.shape[1]:
            raise MetricError(
                f"labels of the loss must be classes from 0 to {scores.shape[1] - 1}, got "
                f"{np.unique(truth).tolist()}"
            )
        self._all_probabilities &= bool(are_probabilities(scores).all())
        if self.from_logits:
            logarithms = log_softmax(scores)
        else:
            tiny = np.finfo(np.float64).eps
            logarithms = np.log(np.clip(_check_probabilities("loss", scores), tiny, 1 - tiny))
        self.take_in(-np.take_along_axis(logarithms, truth[:, np.newaxis], axis=1))

    def merge(self, other: Any) -> None:
        """Add the values of another loss."""
        super().merge(other)
        self._all_probabilities &= other._all_probabilities

    def result(self) -> float:
        """Return the loss since the last reset; NaN if a prediction was NaN.

        Raises:
            MetricError: there are no samples, or expected logits are probabilities.
        """
        value = super().result()
        if self.from_logits:
            _refuse_probabilities("loss", self._all_probabilities)
        return value


def _check_probabilities(metric: str, rows: np.ndarray) -> np.ndarray:
    valid = rows[~np.isnan(rows).any(axis=1)]
    if not are_probabilities(valid).all():
        raise MetricError(
            f"{metric} with from_logits: false requires probabilities, got rows that do not sum "
            f"to 1; for logits set from_logits: true"
        )
    return rows


def _refuse_probabilities(metric: str, all_probabilities: bool) -> None:
    if all_probabilities:
        raise MetricError(
            f"{metric} requires logits, got rows that sum to 1; for probabilities set "
            f"from_logits: false"
        )
