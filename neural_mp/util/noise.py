"""Noise of arrays relative to a reference: noise-to-signal ratios (NSR) and decibels."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from neural_mp.util.pytree import Array

#: NSR of non-finite outputs, since files have no infinity.
MAX_NSR = 1e9


def nsr_to_decibels(nsr: float) -> float:
    """Return the SQNR of an NSR in dB; infinite without noise."""
    return -10 * math.log10(nsr) if nsr > 0 else math.inf


def mask_finite_values(reference: object, output: object) -> tuple[Array, Array] | None:
    """Return the finite values of a reference, and what those of another array add to them.

    None if NaN and Inf are not at the same places in both, or if the shapes differ, as those of
    speech whose length a model predicts.
    """
    expected, actual = (np.asarray(values, np.float64) for values in (reference, output))
    if expected.shape != actual.shape:
        return None
    finite = np.isfinite(expected)
    if not finite.all():
        if not np.array_equal(expected[~finite], actual[~finite], equal_nan=True):
            return None
        expected, actual = expected[finite], actual[finite]
    difference = actual - expected
    return (expected, difference) if np.isfinite(difference).all() else None


def noise_and_signal(reference: object, output: object) -> tuple[float, float]:
    """Return the sums of squares of the differences and of the reference.

    The noise is infinite for other shapes, and for NaN or Inf in one of both alone. Values that are
    NaN or Inf in both alike, as in masks, are neither noise nor signal.
    """
    values = mask_finite_values(reference, output)
    if values is None:
        return math.inf, 0.0
    signal, noise = (float(np.square(array, dtype=np.float64).sum()) for array in values)
    return noise, signal


def compute_output_nsrs(reference: Iterable[Any], outputs: Iterable[Any]) -> list[float]:
    """Return the NSR of each output, at most 1e9; NaN for an output without signal.

    Infinite noise, as in `noise_and_signal`, is 1e9, too.
    """
    nsrs = []
    for expected, actual in zip(reference, outputs, strict=True):
        noise, signal = noise_and_signal(expected, actual)
        if math.isinf(noise):
            nsrs.append(MAX_NSR)
        else:
            nsrs.append(min(noise / signal, MAX_NSR) if signal > 0 else math.nan)
    return nsrs


def compute_mean_nsr(reference: Iterable[Any], outputs: Iterable[Any]) -> float:
    """Return the mean of `compute_output_nsrs`, or 1e9 if one output is that bad.

    Mean over the outputs, so that outputs with large values do not dominate.
    """
    return mean_signal_nsr(compute_output_nsrs(reference, outputs))


def mean_signal_nsr(nsrs: Iterable[float]) -> float:
    """Return the mean of the NSRs of signals, or 1e9 if one is that bad; 0 without a signal."""
    signals = [nsr for nsr in nsrs if not math.isnan(nsr)]
    return MAX_NSR if MAX_NSR in signals else float(np.mean(signals)) if signals else 0.0
