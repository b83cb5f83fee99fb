"""Weights in 4 bits or less: groups of consecutive inputs with a scale and an offset each.

A weight [outputs, inputs] has one scale and one offset per output and group of inputs:
weight ≈ (code - 8) · scale + offset, codes 0 to 15 for 4 bits. Scales and offsets are exact in
bfloat16, in which kernels read them, so that every kernel computes with the same weight.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.enums import Granularity, QuantDType, Scheme
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

#: Group sizes in the order tried: 128 is common to all kernels, 32 the most accurate.
GROUP_SIZES = (128, 64, 32)
#: Largest code, and the code of the offset, for 4 bits.
MAX_CODE, MIDDLE = 15, 8
_MIN_SCALE = 1e-12
#: From this number of bits on, a code stands for 0.
_LEAST_BITS_WITH_ZERO = 3

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class GroupedWeight:
    """A weight in 4 bits or less.

    Attributes:
        codes: uint8 [outputs, inputs], 0 to 2^bits - 1.
        scales, offsets: float32 [outputs, groups], exact in bfloat16.
        bits: bits per code.
        input_factors: float32 [inputs], exact in bfloat16, which the layer multiplies its inputs
            by; None for 1.
    """

    codes: NDArray[np.uint8]
    scales: Floats
    offsets: Floats
    bits: int = 4
    input_factors: Floats | None = None

    @property
    def group_size(self) -> int:
        """Number of consecutive inputs per scale."""
        return int(self.codes.shape[1] // self.scales.shape[1])

    def stored(self) -> Floats:
        """Return the weight that multiplies the scaled inputs, float32 [outputs, inputs]."""
        scales, offsets = (
            np.repeat(values, self.group_size, axis=1) for values in (self.scales, self.offsets)
        )
        return (self.codes.astype(np.float32) - middle_code(self.bits)) * scales + offsets

    def floats(self) -> Floats:
        """Return the weight with the factors of its inputs, float32 [outputs, inputs]."""
        factors = self.input_factors
        return self.stored() if factors is None else self.stored() * factors


def middle_code(bits: int) -> int:
    """Return the code whose value is the offset."""
    return int(1 << (bits - 1))


def max_code(bits: int) -> int:
    """Return the largest code."""
    return int((1 << bits) - 1)


def grouped_specs(
    inputs: int,
    sizes: Iterable[int] = GROUP_SIZES,
    dtypes: Iterable[QuantDType] = (QuantDType.UINT4,),
    scheme: Scheme = Scheme.ASYMMETRIC,
) -> tuple[QuantSpec, ...]:
    """Return the quantizations of a weight with this number of inputs, best first."""
    sizes = tuple(sizes)
    return tuple(
        QuantSpec(dtype, scheme, Granularity.PER_GROUP, group_size=size)
        for dtype in dtypes
        for size in sizes
        if inputs % size == 0
    )


def round_to_nearest(weight: Array, spec: QuantSpec) -> GroupedWeight:
    """Round a weight [outputs, inputs]; `spec` names bits, scheme and group size."""
    scales, offsets = group_parameters(weight, spec)
    return rounded_to_grid(weight, scales, offsets, spec.dtype.bits)


def rounded_to_grid(weight: Array, scales: Floats, offsets: Floats, bits: int) -> GroupedWeight:
    """Round a weight [outputs, inputs] to the nearest codes of given groups."""
    grouped = weight.reshape(*scales.shape, -1).astype(np.float32)
    codes = nearest_codes(grouped, scales[..., None], offsets[..., None], bits)
    return GroupedWeight(codes.reshape(weight.shape), scales, offsets, bits)


def nearest_codes(
    values: Floats, scales: Floats, offsets: Floats, bits: int = 4
) -> NDArray[np.uint8]:
    """Return the codes nearest to values; the arrays broadcast against each other."""
    steps = np.rint((values - offsets) / scales) + middle_code(bits)
    return np.clip(steps, 0, max_code(bits), out=steps).astype(np.uint8)


def group_parameters(weight: Array, spec: QuantSpec) -> tuple[Floats, Floats]:
    """Return scales and offsets [outputs, groups] that cover the range of each group."""
    grouped = weight.reshape(len(weight), -1, spec.group_size or 1).astype(np.float32)
    return parameters_of(grouped.min(axis=2), grouped.max(axis=2), spec)


def parameters_of(low: Floats, high: Floats, spec: QuantSpec) -> tuple[Floats, Floats]:
    """Return scales and offsets of ranges.

    Asymmetric offsets of 3 and 4 bits are whole numbers of steps, (middle - zero point) · scale, as
    formats with integer zero points store them; such ranges are extended to hold 0. With 4 codes,
    half a step would cost too much: offsets are any numbers.
    """
    bits = spec.dtype.bits
    if bits < _LEAST_BITS_WITH_ZERO and spec.scheme is Scheme.ASYMMETRIC:
        scales = to_bfloat16(np.maximum((high - low) / max_code(bits), _MIN_SCALE))
        # Around the middle of the range, so that the rounding of the scale is shared by both ends.
        return scales, to_bfloat16((low + high) / 2 + scales / 2)
    low, high = np.minimum(low, 0), np.maximum(high, 0)
    if spec.scheme is Scheme.SYMMETRIC:
        scales = np.maximum(np.maximum(high, -low) / (middle_code(bits) - 1), _MIN_SCALE)
        return to_bfloat16(scales), np.zeros_like(scales)
    scales = to_bfloat16(np.maximum((high - low) / max_code(bits), _MIN_SCALE))
    zero_points = np.clip(np.rint(-low / scales), 0, max_code(bits))
    return scales, to_bfloat16((middle_code(bits) - zero_points) * scales)


def to_bfloat16(values: Array) -> Floats:
    """Round float32 values to the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def packed(codes: NDArray[np.uint8], bits: int = 4) -> NDArray[np.uint8]:
    """Return codes [outputs, inputs] as bytes, the first input in the upper bits."""
    single = codes[..., None] >> np.arange(bits - 1, -1, -1, dtype=np.uint8) & 1
    return np.packbits(single.reshape(len(codes), -1), axis=1)
