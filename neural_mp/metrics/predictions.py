"""Predictions and labels: selection among several outputs, and conversion to matching numpy arrays.

A model with one output returns an array. A model with several outputs returns the framework's
container: a dict, a named tuple or a dataclass, whose keys are the names; a list with item names
(ONNX, TensorFlow graphs); or a plain tuple, whose outputs only have positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from neural_mp.common import can_merge
from neural_mp.errors import ConfigurationError, MetricError, did_you_mean
from neural_mp.util.pytree import convert_to_numpy

CLASSES_KEPT_APART = "; predictions are [N] or [N, C], labels [N], [N, 1] or one-hot [N, C]"


def map_named_outputs(values: object) -> dict[str, Any] | None:
    """Return the outputs by name, or by position as text; None for a single output.

    A list of numbers or other items that are not arrays is a single output.
    """
    if isinstance(values, Mapping):
        outputs = {str(name): value for name, value in values.items()}
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        outputs = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    elif isinstance(values, list | tuple) and any(_is_array(value) for value in values):
        names = getattr(values, "_fields", None) or getattr(values, "names", None)
        outputs = dict(zip(map(str, names or range(len(values))), values, strict=True))
    else:
        return None
    return {name: value for name, value in outputs.items() if value is not None}


def choose_output(values: object, output: str | int, what: str) -> Any:
    """Select one of several outputs.

    Args:
        values: the output of the model or dataloader.
        output: name of an output, or its position from 0; negative positions count from the end.
        what: `"predictions"` or `"labels"`, for messages.

    Raises:
        MetricError: there is no such output; the message lists the existing outputs.
    """
    outputs = map_named_outputs(values)
    if outputs is None:
        if output in (0, -1):
            return values
        raise MetricError(
            f"output {output!r} requires several {what}, got one {describe_value(values)}; remove "
            "output"
        )
    if isinstance(output, int):
        by_place = values if isinstance(values, list | tuple) else list(outputs.values())
        if -len(by_place) <= output < len(by_place):
            return by_place[output]
    elif output in outputs:
        return outputs[output]
    hint = did_you_mean(output, outputs) if isinstance(output, str) else ""
    hint = f" –{hint.removeprefix(';')}" if "mean" in hint else ""
    raise MetricError(
        f"the {what} have no output {output!r}; there are {format_output_list(outputs)}{hint}"
    )


def choose_output_labels(labels: object, preds: object, output: str | int | None) -> Any:
    """Select the labels of an output: those at the same name or position, or all labels.

    Args:
        labels: a dict with the output's name; several arrays, one per output; or anything else,
            which is returned unchanged.
        preds: all outputs of the model.
        output: the selected output; None for all.
    """
    if isinstance(labels, Mapping) and output in labels:
        return labels[output]
    outputs, several = map_named_outputs(preds), map_named_outputs(labels)
    if output is None or outputs is None or several is None or isinstance(labels, Mapping):
        return labels
    index = list(outputs).index(output) if isinstance(output, str) else output
    if len(several) != len(outputs):
        return labels
    own = list(several.values())
    # The list may also hold the samples of one batch.
    samples = np.shape(list(outputs.values())[index])[:1]
    return own[index] if all(np.shape(item)[:1] == samples for item in own) else labels


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the logarithms of the probabilities along the last axis; NaN if logits overflowed."""
    with np.errstate(invalid="ignore"):
        shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)))


def format_output_list(outputs: Mapping[str, Any]) -> str:
    """Format as `'mask' (float32 [4, 3, 8, 8]) and 'edges' (…)`; positions without quotes."""
    return " and ".join(
        f"{name if name.isdigit() else repr(name)} ({describe_value(value)})"
        for name, value in outputs.items()
    )


def describe_value(value: Any) -> str:
    """Describe an array by dtype and shape, anything else by type."""
    if not _is_array(value):
        return type(value).__name__
    dtype = str(value.dtype).rpartition(".")[2]
    return f"{dtype} {list(value.shape)}"


def _is_array(value: object) -> bool:
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "dtype")


class OfOutput:
    """A metric of one of several outputs, or one of several values of a metric.

    Args:
        metric: the wrapped metric.
        output: the output passed to the metric; None for all outputs.
        label: the labels passed to the metric; None for those of the output's name or position
            if they exist, else all labels.
        value: the selected value, if the result is a dict; None for all values.

    Raises:
        ConfigurationError: `output` or `label` is neither a name nor a position, or `value` is not
            a name.
    """

    def __init__(
        self,
        metric: Any,
        output: str | int | None = None,
        label: str | int | None = None,
        value: str | None = None,
    ) -> None:
        self.__wrapped__ = metric
        self.output, self.label, self.value = output, label, value
        for option, kinds, rule in (
            ("output", str | int, "a name or a position from 0"),
            ("label", str | int, "a name or a position from 0"),
            ("value", str, "a name"),
        ):
            choice = getattr(self, option)
            if choice is not None and (not isinstance(choice, kinds) or isinstance(choice, bool)):
                raise ConfigurationError(f"{option} of the metric must be {rule}, got {choice!r}")

    @property
    def higher_is_better(self) -> Any:
        """The direction of the wrapped metric."""
        return getattr(self.__wrapped__, "higher_is_better", None)

    @property
    def running(self) -> bool:
        """Whether `result` may be called between batches."""
        return bool(getattr(self.__wrapped__, "running", False))

    @property
    def best_value(self) -> float | None:
        """The best possible value; None if unknown."""
        best: float | None = getattr(self.__wrapped__, "best_value", None)
        return best

    @property
    def compare_label(self) -> bool:
        """Whether the metric compares with labels instead of predictions of the FP32 model."""
        return getattr(self.__wrapped__, "compare_label", True) is not False

    @property
    def merge(self) -> Callable[[OfOutput], None] | None:
        """Function that adds the batches of another instance; None if the metric cannot merge."""
        if not can_merge(self.__wrapped__):
            return None
        return lambda other: self.__wrapped__.merge(other.__wrapped__)

    def reset(self) -> None:
        """Discard all batches."""
        self.__wrapped__.reset()

    @property
    def takes_mask(self) -> bool:
        """Whether `update` takes the mask of the tokens that count."""
        return getattr(self.__wrapped__, "takes_mask", False) is True

    def update(self, preds: Any, labels: Any, **options: Any) -> None:
        """Add one batch; `options` are those of the wrapped metric.

        Raises:
            MetricError: there is no such output.
        """
        prediction = (
            preds if self.output is None else choose_output(preds, self.output, "predictions")
        )
        if self.label is not None:
            truth = choose_output(labels, self.label, "labels")
        else:
            truth = choose_output_labels(labels, preds, self.output)
        self.__wrapped__.update(prediction, truth, **options)

    def result(self) -> Any:
        """Return the value over all batches.

        Raises:
            MetricError: the metric has no value of this name.
        """
        result = self.__wrapped__.result()
        if self.value is None:
            return result
        if not isinstance(result, Mapping) or self.value not in result:
            names = did_you_mean(self.value, result) if isinstance(result, Mapping) else ""
            raise MetricError(f"the metric has no value {self.value!r}{names}")
        return result[self.value]


def convert_to_array(values: object, what: str) -> np.ndarray:
    """Convert an array or tensor of any framework to a numpy array of numbers.

    Args:
        values: array, tensor, number or nested list; or a container with a single array or
            tensor.
        what: `"predictions"` or `"labels"`, for messages.

    Raises:
        MetricError: there are several arrays, or the values are not numbers.
    """
    values = _require_single_output(values, what)
    try:
        array = convert_to_numpy(values)
    except ValueError as error:
        raise MetricError(f"the {what} do not form one array: {error}") from error
    if array.dtype.kind not in "biuf":
        raise MetricError(
            f"the {what} must be numbers, got dtype {array.dtype}"
            + (_LABEL_HINTS.get(array.dtype.kind, "") if what == "labels" else "")
        )
    return array


#: Kind of a dtype → advice for labels of this dtype.
_LABEL_HINTS = {
    "U": "; number the classes from 0",
    "S": "; number the classes from 0",
    "O": "; does the dataset have labels?",
}


def _require_single_output(values: object, what: str) -> Any:
    outputs = map_named_outputs(values)
    if outputs is None:
        return values
    if len(outputs) != 1:
        raise MetricError(
            f"the {what} must be one array, got {len(outputs)}: {format_output_list(outputs)}; "
            f"select one with the option {'output' if what == 'predictions' else 'label'}"
        )
    return next(iter(outputs.values()))


def convert_number_pairs(preds: object, labels: object) -> tuple[np.ndarray, np.ndarray]:
    """Return predictions and labels as float64 arrays of one shape; `[N]` and `[N, 1]` match.

    Raises:
        MetricError: the shapes differ.
    """
    predicted, truth = convert_to_array(preds, "predictions"), convert_to_array(labels, "labels")
    column = (truth.size, 1)
    if {predicted.shape, truth.shape} == {column, column[:1]}:
        predicted, truth = predicted.reshape(-1), truth.reshape(-1)
    if predicted.shape != truth.shape:
        raise _shape_mismatch_error(predicted, truth, "; they must be the same")
    return np.atleast_1d(predicted.astype(np.float64)), np.atleast_1d(truth.astype(np.float64))


def score_pairs(preds: object, labels: object) -> tuple[np.ndarray, np.ndarray]:
    """Return scores, `[N]` for two classes or `[N, C]`, and the true classes, int64 `[N]`.

    Raises:
        MetricError: the shapes do not fit, or a label is not a class of the scores.
    """
    scores, truth = convert_to_array(preds, "predictions"), convert_to_array(labels, "labels")
    if scores.ndim == 2 and scores.shape[1] == 1:
        scores = scores.reshape(-1)
    classes = _find_true_classes(scores, truth)
    if scores.ndim not in (1, 2) or len(scores) != len(classes):
        raise _shape_mismatch_error(scores, truth, CLASSES_KEPT_APART)
    if scores.ndim == 2 and classes.size:
        _check_range(classes, scores.shape[1])
    return scores, classes


def convert_class_pairs(
    preds: object, labels: object, threshold: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return predicted and true classes, int64 `[N]` each.

    Scores `[N, C]` predict the argmax, the first of equal maxima; floats `[N]` predict class 1
    above `threshold`, else 0; integers `[N]` are classes. NaN predicts a wrong class, whatever
    the label.

    Raises:
        MetricError: the shapes do not fit, or a label is not a class of the scores.
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


def are_probabilities(rows: np.ndarray) -> np.ndarray:
    """Whether each row holds probabilities, with the tolerance of 8 mantissa bits (bfloat16)."""
    return (rows >= 0).all(axis=1) & (np.abs(rows.sum(axis=1) - 1) < 1e-2)


def _find_true_classes(scores: np.ndarray, labels: np.ndarray) -> np.ndarray:
    if labels.ndim == 2 and labels.shape[1] > 1:
        one_hot = np.isin(labels, (0, 1)).all() and (labels.sum(axis=1) == 1).all()
        if not one_hot or (scores.ndim == 2 and labels.shape != scores.shape):
            raise _shape_mismatch_error(scores, labels, CLASSES_KEPT_APART)
        return labels.argmax(axis=1).astype(np.int64)
    if labels.ndim not in (1, 2):
        raise _shape_mismatch_error(scores, labels, CLASSES_KEPT_APART)
    return convert_to_integers(labels.reshape(-1), "labels")


def convert_to_integers(values: np.ndarray, what: str) -> np.ndarray:
    """Return `values` as int64.

    Raises:
        MetricError: a value is a fraction or NaN.
    """
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    with np.errstate(invalid="ignore"):
        whole = np.nan_to_num(values).astype(np.int64)
    if not np.array_equal(whole, values):
        raise MetricError(
            f"the {what} must be classes, whole numbers from 0, got {values[whole != values][0]}"
        )
    return whole


def _make_range_hint(classes: np.ndarray, count: int) -> str:
    if classes.min() >= 1 and classes.max() == count:
        return "; if the labels count from 1, subtract 1"
    if count == 2:
        return (
            "; predicted classes, instead of scores, must be integers; for a regression, choose "
            "the metric RMSE, MSE or MAE"
        )
    return ""


def _check_range(classes: np.ndarray, count: int) -> None:
    if classes.min() < 0 or classes.max() >= count:
        raise MetricError(
            f"labels must be classes from 0 to {count - 1}, as the predictions, got "
            f"{classes.min()} to {classes.max()}" + _make_range_hint(classes, count)
        )


def _shape_mismatch_error(predicted: np.ndarray, truth: np.ndarray, hint: str) -> MetricError:
    return MetricError(
        f"predictions of shape {predicted.shape} do not fit labels of shape {truth.shape}{hint}"
    )
