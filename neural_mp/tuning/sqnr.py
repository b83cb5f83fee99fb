"""SQNR of a converted model's outputs relative to FP32, for runs without a metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel

#: NSR of non-finite outputs, since files have no infinity.
MAX_NSR = 1e9
#: SQNR in dB below which outputs may be unusable: noise of a tenth of the amplitude.
MIN_SQNR_DB = 20.0


def mean_nsr(reference: list[Any], found: list[Any]) -> float:
    """Return the NSR, at most 1e9, which also stands for NaN.

    Mean over the outputs, so that outputs with large values do not dominate.
    """
    nsrs = []
    for expected, got in zip(reference, found, strict=True):
        power = float(np.mean(np.square(expected, dtype=np.float64)))
        error = np.mean(np.square(np.subtract(got, expected, dtype=np.float64)))
        if not np.isfinite(error):
            return MAX_NSR
        if power > 0:
            nsrs.append(float(error) / power)
    return min(float(np.mean(nsrs)), MAX_NSR) if nsrs else 0.0


def output_sqnr_db(
    reference: AnyModel, candidate: AnyModel, batches: Iterable[Any]
) -> float | None:
    """Return the SQNR of a candidate's outputs over all batches, in dB.

    Infinite without differences; None if the outputs hold no floating-point numbers.
    """
    nsrs = []
    for inputs in batches:
        expected = reference.float_outputs(inputs)
        if not expected:
            return None
        nsrs.append(mean_nsr(expected, candidate.float_outputs(inputs)))
    if not nsrs:
        return None
    noise = float(np.mean(nsrs))
    return -10 * math.log10(noise) if noise > 0 else math.inf
