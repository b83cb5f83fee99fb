"""Verification of a model in another runtime by the outputs of its source."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.errors import NeuralMPError, one_line
from neural_mp.tuning.measurement.sqnr import decibels, mean_nsr
from neural_mp.util.pytree import as_numpy, structure_of, tree_leaves

#: SQNR in dB that FP32 in another runtime must reach, with the source as reference.
MIN_RUNTIME_SQNR_DB = 90.0
#: Largest fraction of integers or booleans that may differ, where rounding decides a near tie.
_MAX_DIFFERENT = 1e-3


def compared(
    source: AnyModel, candidate: AnyModel, batches: Iterable[Any]
) -> tuple[float | None, str]:
    """Compare outputs with those of the source.

    Returns:
        The lowest SQNR over all batches in dB, None without float outputs; and the reason why the
        candidate is ruled out, or an empty text.
    """
    lowest: float | None = None
    for inputs in batches:
        expected = source(inputs)
        try:
            actual = candidate(inputs)
        except (NeuralMPError, RuntimeError, ValueError) as error:
            return lowest, f"fails on a batch that the source accepts: {one_line(error)}"
        reason = _difference(expected, actual)
        if reason:
            return lowest, reason
        pairs = zip(_arrays(expected), _arrays(actual), strict=True)
        for reference, output in ((a, b) for a, b in pairs if a.dtype.kind == "f"):
            sqnr_db = decibels(mean_nsr([reference], [output]))
            lowest = sqnr_db if lowest is None else min(lowest, sqnr_db)
    if lowest is not None and lowest < MIN_RUNTIME_SQNR_DB:
        return lowest, (
            f"the outputs must have an SQNR of at least {MIN_RUNTIME_SQNR_DB:g} dB relative to the "
            f"source, got {lowest:.1f} dB"
        )
    return lowest, ""


def _arrays(outputs: Any) -> list[np.ndarray]:
    leaves = (leaf for leaf in tree_leaves(outputs, sort_keys=True) if leaf is not None)
    return [as_numpy(leaf) for leaf in leaves]


def _difference(expected: Any, actual: Any) -> str:
    """Return a difference of structure, names, dtypes, shapes or integers; empty without one."""
    if structure_of(expected) != structure_of(actual):
        return "the structure or the names of the outputs differ"
    for reference, output in zip(_arrays(expected), _arrays(actual), strict=True):
        if reference.dtype != output.dtype or reference.shape != output.shape:
            return (
                f"an output must be {reference.dtype}{list(reference.shape)}, got "
                f"{output.dtype}{list(output.shape)}"
            )
        if reference.dtype.kind != "f" and reference.size:
            different = float(np.mean(reference != output))
            if different > _MAX_DIFFERENT:
                return f"{different:.2%} of the values of an integer output differ"
    return ""
