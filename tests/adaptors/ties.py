"""Numbers that lie between two steps of a scale: float32 and float64 may round them apart."""

from __future__ import annotations

import numpy as np


def near_tie(real: np.ndarray, step: float, within: float = 0.03) -> np.ndarray:
    """Where a number lies so near the middle of two steps that it may be rounded either way.

    Biases are rounded, too, and move what they are added to by a hundredth of a step.
    """
    steps = real / step
    return np.abs(steps - np.floor(steps) - 0.5) < within


def off_ties(real: np.ndarray, step: float) -> np.ndarray:
    """The numbers, those near a tie moved a little."""
    return np.where(near_tie(real, step), real + step / 8, real).astype(real.dtype)
