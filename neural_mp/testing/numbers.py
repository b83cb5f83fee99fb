"""How near two arrays are, and the simplest plans."""

from __future__ import annotations

import numpy as np

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, Precision
from neural_mp.space import TuningSpace


def signal_to_noise(reference: np.ndarray, given: np.ndarray) -> float:
    """The signal-to-noise ratio of an array beside its reference, in decibels."""
    noise = max(float(np.linalg.norm(reference - given)), 1e-12)
    return float(20 * np.log10(float(np.linalg.norm(reference)) / noise))


def uniform(space: TuningSpace, precision: Precision) -> PrecisionPlan:
    """Every decided op in a precision where it can run in it, the rest in FP32."""
    return PrecisionPlan(
        {op: space.capabilities[op].config(precision) or FP32 for op in space.decided}
    )
