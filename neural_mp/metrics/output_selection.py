"""One of several outputs: by its name where it has one, else by its position.

A model with one output gives an array. A model with several gives them as the framework does: a
dict, a named tuple or a dataclass, whose keys are the names; a list that knows the names of its
items (ONNX, graphs of TensorFlow); or a bare tuple, whose outputs have positions alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from neural_mp.common import can_merge
from neural_mp.errors import MetricError, did_you_mean


def outputs_of(values: object) -> dict[str, Any] | None:
    """The outputs by name, or by position written as text; None where there is one alone.

    A list of numbers, or of other things that are no arrays, is one output.
    """
    if isinstance(values, Mapping):
        found = {str(name): value for name, value in values.items()}
    elif dataclasses.is_dataclass(values) and not isinstance(values, type):
        found = {field.name: getattr(values, field.name) for field in dataclasses.fields(values)}
    elif isinstance(values, list | tuple) and any(_is_array(value) for value in values):
        names = getattr(values, "_fields", None) or getattr(values, "names", None)
        found = dict(zip(map(str, names or range(len(values))), values, strict=True))
    else:
        return None
    return {name: value for name, value in found.items() if value is not None}


def chosen(values: object, output: str | int, what: str) -> Any:
    """One of several outputs.

    Args:
        values: what the model, or the dataloader, gave.
        output: its name, or its position from 0; a negative one counts from the end.
        what: `"predictions"` or `"labels"`, for messages.

    Raises:
        MetricError: there is no such output; the message names those that there are.
    """
    outputs = outputs_of(values)
    if outputs is None:
        if output in (0, -1):
            return values
        raise MetricError(
            f"output {output!r} is asked for, but the {what} are one {described(values)} without "
            f"a name; leave output out"
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
        f"the {what} have no output {output!r}; there are {described_outputs(outputs)}{hint}"
    )


def chosen_labels(labels: object, preds: object, output: str | int | None) -> Any:
    """The labels that belong to an output: of several the same one, of one alone that.

    Args:
        labels: a dict that has the output's name; several arrays, one for each output; or
            anything else, which is taken as it is.
        preds: all outputs of the model.
        output: which of them was chosen; None for all.
    """
    if isinstance(labels, Mapping) and output in labels:
        return labels[output]
    outputs, several = outputs_of(preds), outputs_of(labels)
    if output is None or outputs is None or several is None or isinstance(labels, Mapping):
        return labels
    place = list(outputs).index(output) if isinstance(output, str) else output
    if len(several) != len(outputs):
        return labels
    own = list(several.values())
    # A list may as well hold the samples of one batch.
    samples = np.shape(list(outputs.values())[place])[:1]
    return own[place] if all(np.shape(item)[:1] == samples for item in own) else labels


def described_outputs(outputs: Mapping[str, Any]) -> str:
    """`'mask' (float32 [4, 3, 8, 8]) and 'edges' (…)`, for messages; positions without quotes."""
    return " and ".join(
        f"{name if name.isdigit() else repr(name)} ({described(value)})"
        for name, value in outputs.items()
    )


def described(value: Any) -> str:
    """An array by its dtype and shape; anything else by its type."""
    if not _is_array(value):
        return type(value).__name__
    dtype = str(value.dtype).rpartition(".")[2]
    return f"{dtype} {list(value.shape)}"


def _is_array(value: object) -> bool:
    return getattr(value, "ndim", 0) > 0 and hasattr(value, "dtype")


class OfOutput:
    """A metric of one of several outputs, or one value of several that a metric gives.

    Args:
        metric: what measures.
        output: the output that it is given; None for all of them.
        label: which of several labels it is given; None for that of the output's name or place
            where there is one, else for the labels as they are.
        value: which of its values counts, where its result is a dict; None for all of them.
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

    @property
    def higher_is_better(self) -> Any:
        """What the metric itself says."""
        return getattr(self.__wrapped__, "higher_is_better", None)

    @property
    def running(self) -> bool:
        """Whether it may be asked for its result in between."""
        return bool(getattr(self.__wrapped__, "running", False))

    @property
    def best_value(self) -> float | None:
        """What no sample can better; None where that is not known."""
        found: float | None = getattr(self.__wrapped__, "best_value", None)
        return found

    @property
    def compare_label(self) -> bool:
        """Whether it is given labels, and not what the FP32 model predicts."""
        return getattr(self.__wrapped__, "compare_label", True) is not False

    @property
    def merge(self) -> Callable[[OfOutput], None] | None:
        """Takes in all that another of its kind has taken in; None where the metric cannot."""
        if not can_merge(self.__wrapped__):
            return None
        return lambda other: self.__wrapped__.merge(other.__wrapped__)

    def reset(self) -> None:
        """Forget everything."""
        self.__wrapped__.reset()

    def update(self, preds: object, labels: object) -> None:
        """Take in one batch.

        Raises:
            MetricError: there is no such output.
        """
        prediction = preds if self.output is None else chosen(preds, self.output, "predictions")
        if self.label is not None:
            truth = chosen(labels, self.label, "labels")
        else:
            truth = chosen_labels(labels, preds, self.output)
        self.__wrapped__.update(prediction, truth)

    def result(self) -> Any:
        """The value over everything taken in.

        Raises:
            MetricError: the metric gives no value of that name.
        """
        result = self.__wrapped__.result()
        if self.value is None:
            return result
        if not isinstance(result, Mapping) or self.value not in result:
            names = did_you_mean(self.value, result) if isinstance(result, Mapping) else ""
            raise MetricError(f"the metric gives no value {self.value!r}{names}")
        return result[self.value]
