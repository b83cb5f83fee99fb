"""How near the outputs of a converted model are to those of FP32, where there is no metric."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from neural_mp.core.nested import leaves
from neural_mp.adaptors.contract import Adaptor, Model
from neural_mp.metrics.predictions import as_array

#: The noise of outputs that are no numbers, as a share of the signal; files have no infinity.
USELESS = 1e9
#: Decibels below which outputs may well mean something else: noise of a tenth of the amplitude.
LEAST_DECIBELS = 20.0


def float_outputs(outputs: Any) -> list[Any]:
    """The arrays of floating-point numbers among a model's outputs."""
    arrays = [as_array(leaf, "outputs") for leaf in leaves(outputs) if hasattr(leaf, "shape")]
    return [array for array in arrays if array.dtype.kind == "f"]


def relative_noise(reference: list[Any], found: list[Any]) -> float:
    """The power of what differs, as a share of the reference's, at most 1e9, which NaN counts as.

    The mean over outputs, so that one of large numbers does not hide the rest.
    """
    shares = []
    for expected, got in zip(reference, found, strict=True):
        power = float(np.mean(np.square(expected, dtype=np.float64)))
        error = np.mean(np.square(np.subtract(got, expected, dtype=np.float64)))
        if not np.isfinite(error):
            return USELESS
        if power > 0:
            shares.append(float(error) / power)
    return min(float(np.mean(shares)), USELESS) if shares else 0.0


def signal_to_noise(
    adaptor: Adaptor, reference: Model, candidate: Model, batches: Iterable[Any]
) -> float | None:
    """The signal-to-noise ratio of a candidate's outputs, in decibels.

    Args:
        adaptor: runs the models.
        reference: the FP32 model.
        candidate: the converted model.
        batches: inputs.

    Returns:
        The ratio over all batches, infinite where nothing differs; None where the outputs hold no
        floating-point numbers.
    """
    shares = []
    for inputs in batches:
        expected = float_outputs(adaptor.predict(reference, inputs))
        if not expected:
            return None
        shares.append(relative_noise(expected, float_outputs(adaptor.predict(candidate, inputs))))
    if not shares:
        return None
    noise = float(np.mean(shares))
    return -10 * math.log10(noise) if noise > 0 else math.inf
