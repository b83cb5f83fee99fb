"""Comparison of a converted model as its runtime optimizes it with the same model unoptimized.

A runtime may fuse ops into a kernel that computes something else. Rounding explains some
difference: a fused kernel rounds fewer times.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeVar

import numpy as np

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.op_outputs import OpOutput
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array, list_float_arrays

logger = logging.getLogger(__name__)

M = TypeVar("M")

#: Maximum noise of fused kernels as a multiple of that of the conversion, and the noise that is
#: never too much.
_MAX_RATIO, _NEGLIGIBLE_NSR = 3.0, 1e-4


def check_fusions(adaptor: Framework[M], model: M, converted: M, inputs: object) -> None:
    """Check a converted model on one batch, if the runtime also runs without optimizations.

    Raises:
        ConversionError: the runtime cannot run the converted model, or its optimizations change
            the outputs by more than rounding explains.
    """
    offered = adaptor.unoptimized_run
    if offered is None:
        return
    fused = list_float_arrays(adaptor.predict(converted, inputs))
    try:
        unfused = list_float_arrays(offered.outputs(converted, inputs))
    except ConversionError:
        logger.debug("the model runs with optimizations only", exc_info=True)
        return
    mismatch = describe_mismatch(unfused, fused)
    if mismatch is not None:
        raise ConversionError(
            f"{adaptor.framework} computes {mismatch} in the converted model; exclude the ops "
            f"before that output from conversion"
        )
    if is_close(unfused, fused):
        return
    reference = list_float_arrays(adaptor.predict(model, inputs))
    if exceeds_rounding(reference, unfused, fused):
        op = offered.first_deviating(converted, inputs)
        where = "" if op is None else f", first at op {op!r}"
        raise ConversionError(
            f"the optimizations of {adaptor.framework} change the outputs of the converted model "
            f"by more than rounding explains{where}; exclude the op from conversion"
        )


def describe_mismatch(expected: Sequence[Array], actual: Sequence[Array]) -> str | None:
    """Return the first output of another shape or dtype; None if there is none."""
    if len(expected) != len(actual):
        return f"{len(actual)} floating-point outputs instead of {len(expected)}"
    for right, wrong in zip(expected, actual, strict=True):
        if right.shape != wrong.shape:
            return f"an output of shape {wrong.shape} instead of {right.shape}"
        if right.dtype != wrong.dtype:
            return f"an output of dtype {wrong.dtype} instead of {right.dtype}"
    return None


def is_close(expected: Sequence[Array], actual: Sequence[Array]) -> bool:
    """Whether outputs are equal but for negligible noise."""
    return not exceeds_rounding(expected, expected, actual)


def find_first_difference(
    ops: Iterable[str], unfused: Mapping[str, OpOutput], fused: Mapping[str, OpOutput]
) -> str | None:
    """Return the first op whose results differ by more than negligible noise; None if unknown."""
    compared = (op for op in ops if op in unfused and op in fused)
    return next((op for op in compared if not is_close([unfused[op].real], [fused[op].real])), None)


def exceeds_rounding(
    reference: Sequence[Array], unfused: Sequence[Array], fused: Sequence[Array]
) -> bool:
    """Whether outputs of a fused model deviate by more than rounding explains.

    From the floating-point outputs of the FP32 model, as `reference`, and of the converted model
    without and with optimizations.
    """
    return any(map(_exceeds_rounding, reference, unfused, fused))


def _exceeds_rounding(reference: Array, unfused: Array, fused: Array) -> bool:
    if fused.shape != unfused.shape:
        return True
    finite = np.isfinite(unfused)
    if not np.array_equal(finite, np.isfinite(fused)):
        return True
    if unfused.shape != reference.shape:
        return False
    finite &= np.isfinite(reference)
    expected, plain, ran = (
        array[finite].astype(np.float64) for array in (reference, unfused, fused)
    )
    power = float(np.square(expected).sum()) or float(np.square(plain).sum())
    noise = float(np.square(ran - plain).sum())
    own = float(np.square(plain - expected).sum())
    return noise > max(_MAX_RATIO * own, _NEGLIGIBLE_NSR * power)
