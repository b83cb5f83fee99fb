"""In what forms predictions and labels reach the metrics of Intel Neural Compressor's files.

A model with several outputs gives a list, a tuple or a dict of arrays, a model with one output the
array, or a list that holds it. Sample weights are of no effect, as there.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from neural_mp.errors import MetricError
from neural_mp.metrics.predictions import as_array
from neural_mp.util.pytree import as_numpy


def parts(values: object) -> list[Any]:
    """The arrays that a list, tuple or dict holds; anything else, a list of numbers too, alone."""
    if isinstance(values, Mapping):
        return list(values.values())
    if isinstance(values, list | tuple) and any(getattr(v, "ndim", 0) > 0 for v in values):
        return list(values)
    return [values]


def as_one(values: object, what: str) -> np.ndarray:
    """All of `values` as one array; a list of several arrays is stacked along a new first axis.

    Args:
        values: what a model or a dataloader gave.
        what: `"predictions"` or `"labels"`, for messages.

    Raises:
        MetricError: they do not form one array of numbers.
    """
    pieces = parts(values)
    if len(pieces) == 1:
        return as_array(pieces[0], what)
    shapes = [np.shape(piece) for piece in pieces]
    if len(set(shapes)) != 1:
        raise MetricError(
            f"the {what} are {len(pieces)} arrays of the shapes {shapes[:4]}, and this metric "
            f"takes one; a postprocess transform or a metric of your own can choose among them"
        )
    return np.stack([as_array(piece, what) for piece in pieces])


def whole_numbers(values: np.ndarray, what: str) -> np.ndarray:
    """`values` as int64.

    Raises:
        MetricError: there is a fraction or NaN among them.
    """
    if values.dtype.kind != "f":
        return values.astype(np.int64)
    with np.errstate(invalid="ignore"):
        whole = np.nan_to_num(values).astype(np.int64)
    if not np.array_equal(whole, values):
        raise MetricError(
            f"the {what} must be classes, which are whole numbers, got {values[whole != values][0]}"
        )
    return whole


def text(value: object) -> str:
    """A string, given as such, as bytes in UTF-8, or as an array of one; a number as its digits."""
    if not isinstance(value, str | bytes):
        array = as_numpy(value)
        value = array.item() if array.size == 1 else value
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)
