"""What metrics and evaluation functions give, as numbers."""

from __future__ import annotations

import math
import numbers
from typing import Any

from neural_mp.core.shape_words import shape_words
from neural_mp.errors import MetricError


def number_of(value: Any, name: str) -> float:
    """The number that a result is.

    Args:
        value: what a metric or evaluation function gave.
        name: of the metric or function.

    Raises:
        MetricError: it is no number.
    """
    if callable(getattr(value, "item", None)):  # numpy scalars, tensors of any framework
        try:
            value = value.item()
        except (ValueError, RuntimeError, TypeError):
            raise MetricError(f"{name} must return one number, got {shape_words(value)}") from None
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        raise MetricError(f"{name} must return a number, got {value!r} ({type(value).__name__})")
    try:
        return float(value)
    except OverflowError:
        raise MetricError(f"{name} must return a number that fits a float") from None


def is_usable(accuracy: float) -> bool:
    """Whether an accuracy can be compared: neither NaN nor infinite."""
    return math.isfinite(accuracy)
