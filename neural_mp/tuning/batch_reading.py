"""Interpretation of a batch: inputs with labels, or inputs alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.util.string_enum import StringEnum


class Reading(StringEnum):
    """An interpretation of the batches of a loader."""

    PAIR = "a pair of inputs and labels"
    ALONE = "inputs without labels"
    LABELS_LAST = "inputs followed by labels"


def readings_of(batch: object) -> tuple[Reading, ...]:
    """Return the possible interpretations of a batch, the documented one first."""
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or len(batch) < 2:
        return (Reading.ALONE,)
    if len(batch) == 2:
        return Reading.PAIR, Reading.ALONE
    return Reading.ALONE, Reading.LABELS_LAST


def inputs_of_batch(batch: Any, reading: Reading | None = None) -> Any:
    """Return the inputs of a batch by its interpretation, by default the documented one.

    A batch that does not match the interpretation counts as inputs alone.
    """
    known = readings_of(batch)
    if (reading or known[0]) not in known:
        return batch
    match reading or known[0]:
        case Reading.PAIR:
            return batch[0]
        case Reading.LABELS_LAST:
            return batch[:-1]
    return batch
