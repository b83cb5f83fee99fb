"""Weights in 4 bits: groups of consecutive inputs with a scale and an offset each.

A weight [outputs, inputs] has one scale and one offset per output and group of inputs:
weight ≈ (code - 8) · scale + offset, codes 0 to 15. Scales and offsets are exact in bfloat16, in
which kernels read them, so that every kernel computes with the same weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.enums import Granularity, QuantDType, Scheme
from neural_mp.core.precision import QuantSpec
from neural_mp.util.pytree import Array

#: Group sizes in the order tried: 128 is common to all kernels, 32 the most accurate.
GROUP_SIZES = (128, 64, 32)
#: Largest code, and the code of the offset.
MAX_CODE, MIDDLE = 15, 8
#: Largest magnitude of a symmetric integer.
_SYMMETRIC_LIMIT = 7
_MIN_SCALE = 1e-12


@dataclass(frozen=True)
class GroupedWeight:
    """A weight in 4 bits.

    Attributes:
        codes: uint8 [outputs, inputs], 0 to 15.
        scales, offsets: float32 [outputs, groups], exact in bfloat16.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    offsets: NDArray[np.float32]

    @property
    def group_size(self) -> int:
        """Number of consecutive inputs per scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def floats(self) -> NDArray[np.float32]:
        """Return the weight as float32 [outputs, inputs]."""
        scales, offsets = (
            np.repeat(values, self.group_size, axis=1) for values in (self.scales, self.offsets)
        )
        return (self.codes.astype(np.float32) - MIDDLE) * scales + offsets


def grouped_specs(inputs: int, sizes: Iterable[int] = GROUP_SIZES) -> tuple[QuantSpec, ...]:
    """Return the quantizations of a weight with this number of inputs, best first."""
    return tuple(
        QuantSpec(QuantDType.UINT4, Scheme.ASYMMETRIC, Granularity.PER_GROUP, group_size=size)
        for size in sizes
        if inputs % size == 0
    )


def round_to_nearest(weight: Array, spec: QuantSpec) -> GroupedWeight:
    """Round a weight [outputs, inputs] to 4 bits; `spec` names scheme and group size."""
    scales, offsets = group_parameters(weight, spec)
    grouped = weight.reshape(*scales.shape, -1).astype(np.float32)
    codes = nearest_codes(grouped, scales[..., None], offsets[..., None])
    return GroupedWeight(codes.reshape(weight.shape), scales, offsets)


def nearest_codes(
    values: NDArray[np.float32], scales: NDArray[np.float32], offsets: NDArray[np.float32]
) -> NDArray[np.uint8]:
    """Return the codes nearest to values; the arrays broadcast against each other."""
    steps = np.rint((values - offsets) / scales) + MIDDLE
    return np.clip(steps, 0, MAX_CODE, out=steps).astype(np.uint8)


def group_parameters(
    weight: Array, spec: QuantSpec
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return scales and offsets [outputs, groups] that cover the range of each group."""
    grouped = weight.reshape(len(weight), -1, spec.group_size or 1).astype(np.float32)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    if spec.scheme is Scheme.SYMMETRIC:
        scales = np.maximum(np.maximum(high, -low) / _SYMMETRIC_LIMIT, _MIN_SCALE)
        return to_bfloat16(scales), np.zeros_like(scales)
    scales = to_bfloat16(np.maximum((high - low) / MAX_CODE, _MIN_SCALE))
    return scales, to_bfloat16(low + MIDDLE * scales)


def to_bfloat16(values: Array) -> NDArray[np.float32]:
    """Round float32 values to the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def packed(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return two codes per byte [outputs, inputs / 2], the even input in the upper half."""
    return np.ascontiguousarray(codes[:, ::2] << 4 | codes[:, 1::2])
