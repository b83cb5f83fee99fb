"""Constants stored in 16 bits."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from neural_mp.adaptors.common.signature import Array


def narrowed(values: Array, dtype: Any) -> Array:
    """Values in a 16-bit dtype, those beyond its range as the largest that it has.

    The lowest float32 stands for minus infinity in many a mask, but must not become it.
    """
    with np.errstate(over="ignore"):
        low = values.astype(dtype)
    lost = np.isfinite(values) & ~np.isfinite(low.astype(np.float32))
    if not lost.any():
        return low
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(lost, np.copysign(largest, values).astype(dtype), low)
