"""Predictions and labels of any framework as numpy arrays that belong together."""

from __future__ import annotations

from typing import Any

import numpy as np

from neural_mp.errors import MetricError
from neural_mp.metrics.output_selection import described_outputs, outputs_of
from neural_mp.util.pytree import as_numpy

CLASSES_KEPT_APART = "; predictions are [N] or [N, C], labels [N], [N, 1] or one-hot [N, C]"


def as_array(values: object, what: str) -> np.ndarray:
    """`values`, an array or tensor of any framework, as a numpy array of numbers.

    Args:
        values: array, tensor, number or nested list; what holds one array or
            tensor alone stands for that one.
        what: `"predictions"` or `"labels"`, for messages.

    Raises:
        MetricError: there are several arrays, or none of numbers.
    """
    values = _only_one(values, what)
    try:
        array = as_numpy(values)
    except ValueError as error:
        raise MetricError(f"the {what} do not form one array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise MetricError(
            f"the {what} must be numbers, got dtype {array.dtype}"
            + ("; does the dataset have labels?" if what == "labels" else "")
        )
    return array


def _only_one(values: object, what: str) -> Any:
    outputs = outputs_of(values)
    if outputs is None:
        return values
    if len(outputs) != 1:
        raise MetricError(
            f"the {what} are {len(outputs)} arrays and this metric takes one; choose one with the "
            f"option {'output' if what == 'predictions' else 'label'}, "
            f"there are {described_outputs(outputs)}"
        )
    return next(iter(outputs.values()))


def number_pairs(preds: object, labels: object) -> tuple[np.ndarray, np.ndarray]:
    """Predictions and labels as float64 arrays of one shape; `[N]` and `[N, 1]` fit each other.

    Raises:
        MetricError: the shapes differ.
    """
    predicted, truth = as_array(preds, "predictions"), as_array(labels, "labels")
    column = (truth.size, 1)
    if {predicted.shape, truth.shape} == {column, column[:1]}:
        predicted, truth = predicted.reshape(-1), truth.reshape(-1)
    if predicted.shape != truth.shape:
        raise _misfit(predicted, truth, "; they must be the same")
    return np.atleast_1d(predicted.astype(np.float64)), np.atleast_1d(truth.astype(np.float64))


def score_pairs(preds: object, labels: object) -> tuple[np.ndarray, np.ndarray]:
    """Scores, `[N]` for two classes or `[N, C]`, and the true classes, int64 `[N]`.

    Raises:
        MetricError: the shapes do not fit, or a label is no class that the scores have.
    """
    scores, truth = as_array(preds, "predictions"), as_array(labels, "labels")
    if scores.ndim == 2 and scores.shape[1] == 1:
        scores = scores.reshape(-1)
    classes = _true_classes(scores, truth)
    if scores.ndim not in (1, 2) or len(scores) != len(classes):
        raise _misfit(scores, truth, CLASSES_KEPT_APART)
    if scores.ndim == 2 and classes.size:
        _check_range(classes, scores.shape[1])
    return scores, classes


def class_pairs(preds: object, labels: object, threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """Predicted and true classes, int64 `[N]` each.

    Scores `[N, C]` predict the class of the highest, the first one where several are equal;
    floats `[N]` predict class 1 above `threshold`, else 0; integers `[N]` are classes. NaN
    predicts a class that is wrong, whatever the label.

    Raises:
        MetricError: the shapes do not fit, or a label is no class that the scores have.
    """
    scores, truth = score_pairs(preds, labels)
    if scores.dtype.kind != "f":
        return (scores if scores.ndim == 1 else scores.argmax(axis=1)).astype(np.int64), truth
    if scores.ndim == 1:
        if truth.size:
            _check_range(truth, 2)
        predicted, wrong, unknown = scores > threshold, 1 - truth, np.isnan(scores)
    else:
        predicted = scores.argmax(axis=1)
        wrong, unknown = (truth + 1) % scores.shape[1], np.isnan(scores).any(axis=1)
    return np.where(unknown, wrong, predicted.astype(np.int64)), truth


def _true_classes(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] > 1:
        one_hot = np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()
        if not one_hot or (scores.ndim == 2 and labels.shape != scores.shape):
            raise _misfit(scores, labels, CLASSES_KEPT_APART)
        return labels.argmax(axis=1).astype(np.int64)
    if labels.ndim not in (1, 2):
        raise _misfit(scores, labels, CLASSES_KEPT_APART)
    labels = labels.reshape(-1)
    classes = np.nan_to_num(labels).astype(np.int64)
    if not np.array_equal(classes, labels):
        raise MetricError(
            f"labels must be classes, whole numbers from 0, got "
            f"{labels[classes != labels][0]} among them"
        )
    return classes


def _check_range(classes: np.ndarray, count: int) -> None:
    if classes.min() < 0 or classes.max() >= count:
        raise MetricError(
            f"labels go from {classes.min()} to {classes.max()} but the predictions know "
            f"{count} classes, 0 to {count - 1}"
            + ("; predicted classes, instead of scores, must be integers" if count == 2 else "")
        )


def _misfit(predicted: np.ndarray, truth: np.ndarray, hint: str) -> MetricError:
    return MetricError(
        f"predictions of shape {predicted.shape} do not fit labels of shape {truth.shape}{hint}"
    )
