"""Rounding weights to integers, the same for all frameworks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.calibration import LEAST_SPAN
from neural_mp.core.byte_products import weight_limit
from neural_mp.core.precision import Precision
from neural_mp.space.space import TuningSpace

Array = NDArray[Any]


def weight_scales(weight: Array, axes: tuple[int, ...], limit: int) -> Array:
    """The step of every output channel, symmetric: the largest magnitude over `limit`.

    Args:
        weight: the weight.
        axes: its axes other than those of the output channels.
        limit: the largest integer, 127 or 63.

    Returns:
        Float32 with the axes of the weight, of length 1 where they are in `axes`. A channel that
        is zero everywhere may have any step, and has 1.
    """
    largest = np.abs(weight).max(axis=axes, keepdims=True, initial=0)
    return np.where(largest > LEAST_SPAN, largest / limit, 1).astype(np.float32)


def weight_limit_of(space: TuningSpace, op: str) -> int:
    """The largest integer that the weight of an op is stored with, unless a plan says otherwise."""
    config = space.capabilities[op].config(Precision.INT8)
    return weight_limit(config.weight if config is not None else None)


def rounded_to_int8(weight: Array, scales: Array, limit: int) -> NDArray[np.int8]:
    """A weight in steps of `scales`, cut off at ±`limit`."""
    steps = np.rint(weight / scales)
    return np.clip(steps, -limit, limit, out=steps).astype(np.int8)
