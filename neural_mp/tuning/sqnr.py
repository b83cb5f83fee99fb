"""How near the outputs of a converted model are to those of FP32, where there is no metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel

#: The noise of outputs that are no numbers, as a share of the signal; files have no infinity.
MAX_NSR = 1e9
#: Decibels below which outputs may well mean something else: noise of a tenth of the amplitude.
LEAST_DECIBELS = 20.0


def relative_noise(reference: list[Any], found: list[Any]) -> float:
    """The power of what differs, as a share of the reference's, at most 1e9, which NaN counts as.

    The mean over outputs, so that one of large numbers does not hide the rest.
    """
    shares = []
    for expected, got in zip(reference, found, strict=True):
        power = float(np.mean(np.square(expected, dtype=np.float64)))
        error = np.mean(np.square(np.subtract(got, expected, dtype=np.float64)))
        if not np.isfinite(error):
            return MAX_NSR
        if power > 0:
            shares.append(float(error) / power)
    return min(float(np.mean(shares)), MAX_NSR) if shares else 0.0


def signal_to_noise(
    reference: AnyModel, candidate: AnyModel, batches: Iterable[Any]
) -> float | None:
    """The signal-to-noise ratio of a candidate's outputs, in decibels.

    Args:
        reference: the FP32 model.
        candidate: the converted model.
        batches: inputs.

    Returns:
        The ratio over all batches, infinite where nothing differs; None where the outputs hold no
        floating-point numbers.
    """
    shares = []
    for inputs in batches:
        expected = reference.float_outputs(inputs)
        if not expected:
            return None
        shares.append(relative_noise(expected, candidate.float_outputs(inputs)))
    if not shares:
        return None
    noise = float(np.mean(shares))
    return -10 * math.log10(noise) if noise > 0 else math.inf
