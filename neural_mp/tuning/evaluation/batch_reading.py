"""Interpretation of a batch: inputs with labels, or inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.errors import DataError, NeuralMPError
from neural_mp.util.labels import labels_of
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.text import shape_words, with_article


class Reading(StringEnum):
    """An interpretation of the batches of a loader."""

    PAIR = "a pair of inputs and labels"
    ALONE = "inputs without labels"
    LABELS_LAST = "inputs followed by labels"


def readings_of(batch: object, has_labels: bool = False) -> tuple[Reading, ...]:
    """Return the possible interpretations of a batch, the documented one first.

    A batch that must hold labels has one interpretation.
    """
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or len(batch) < 2:
        return (Reading.ALONE,)
    if len(batch) == 2:
        return (Reading.PAIR,) if has_labels else (Reading.PAIR, Reading.ALONE)
    return (Reading.LABELS_LAST,) if has_labels else (Reading.ALONE, Reading.LABELS_LAST)


def inputs_of_batch(batch: Any, reading: Reading | None = None) -> Any:
    """Return the inputs of a batch by its interpretation, by default the documented one.

    A batch that does not match the interpretation counts as inputs alone.
    """
    readings = readings_of(batch)
    if (reading or readings[0]) not in readings:
        return batch
    match reading or readings[0]:
        case Reading.PAIR:
            return batch[0]
        case Reading.LABELS_LAST:
            return batch[:-1]
    return batch


def required_inputs(batch: Any, reading: Reading | None, location: str) -> Any:
    """Return `inputs_of_batch`; `location` names the batch in the message.

    Raises:
        DataError: the inputs are None.
    """
    inputs = inputs_of_batch(batch, reading)
    if inputs is None:
        raise DataError(f"{location} must contain inputs, got None")
    return inputs


def labelled_pair(batch: Any, name: str, label_key: str | None) -> tuple[Any, Any]:
    """Return a batch as inputs and labels; the inputs of a dict are the whole dict.

    Args:
        batch: a pair, inputs followed by labels, or a dict that contains the labels.
        name: the loader, for the message.
        label_key: key of the labels in a dict; None for the reserved names.

    Raises:
        DataError: the batch holds no labels.
    """
    if isinstance(batch, Mapping):
        return batch, labels_of(batch, name, label_key)
    if readings_of(batch, has_labels=True) == (Reading.LABELS_LAST,):
        return batch[:-1], batch[-1]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        description = shape_words(batch)
        if hasattr(batch, "shape"):
            description = f"{with_article(type(batch).__name__)} alone, {description}"
        raise DataError(f"{name} must yield (inputs, labels), got {description}")
    return batch[0], batch[1]


def name_loader(error: NeuralMPError, name: str, position: int = 1) -> None:
    """Add the loader and the number of the batch to an error."""
    if name and name not in str(error):
        error.args = (f"{place_of(name, position)}: {error}",)


def place_of(name: str, position: int) -> str:
    """Return the loader and the number of a batch as text."""
    return f"batch {position} of {name}" if position else name
