"""Weights in groups of consecutive inputs with a scale and an integer zero point each.

A weight [outputs, inputs] has one scale and one zero point per output and group of inputs:
weight ≈ (code - zero point) · scale. The last group is filled up with zeros if the inputs are no
multiple of the group size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.enums import Granularity, KernelInputs, QuantDType, Scheme
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

#: Group sizes in the order of preference: the first is the smallest and fastest, the last the most
#: accurate.
GROUP_SIZES = (128, 64, 32)
_MIN_SCALE = 1e-12
#: Largest magnitude of an input rounded to INT8.
_INPUT_LIMIT = 127


@dataclass(frozen=True)
class IntegerGroups:
    """A weight in groups.

    Attributes:
        codes: uint8 [outputs, groups, group size].
        scales: float32 [outputs, groups].
        zero_points: uint8 [outputs, groups].
        inputs: number of inputs.
    """

    codes: NDArray[np.uint8]
    scales: NDArray[np.float32]
    zero_points: NDArray[np.uint8]
    inputs: int

    def floats(self) -> NDArray[np.float32]:
        """Return the weight as float32 [outputs, inputs]."""
        steps = self.codes.astype(np.float32) - self.zero_points[..., None]
        restored = steps * self.scales[..., None]
        return restored.reshape(len(restored), -1)[:, : self.inputs]


def forms(sizes: Iterable[int], inputs: KernelInputs) -> Iterator[QuantSpec]:
    """Yield the quantizations of products: 4 bits, the fastest scheme first, then 8 bits."""
    sizes = tuple(sizes)
    for scheme in (Scheme.SYMMETRIC, Scheme.ASYMMETRIC):
        for size in sizes:
            yield group_spec(4, size, inputs, scheme)
    for size in sizes:
        yield group_spec(8, size, inputs)


def group_spec(
    bits: int, size: int, inputs: KernelInputs, scheme: Scheme = Scheme.ASYMMETRIC
) -> QuantSpec:
    """Return the quantization of a weight in 4 or 8 bits with groups of a size.

    Symmetric weights have a signed dtype and no zero points.
    """
    if scheme is Scheme.SYMMETRIC:
        dtype = QuantDType.INT4 if bits == 4 else QuantDType.INT8
    else:
        dtype = QuantDType.UINT4 if bits == 4 else QuantDType.UINT8
    return QuantSpec(dtype, scheme, Granularity.PER_GROUP, group_size=size, inputs=inputs)


def round_in_groups(weight: Array, spec: QuantSpec) -> IntegerGroups:
    """Round a weight [outputs, inputs]; `spec` names bits, scheme and group size.

    Codes are unsigned; a symmetric weight has the zero point in their middle.
    """
    assert spec.group_size is not None
    grouped = _grouped(weight, spec.group_size)
    most = 2**spec.dtype.bits - 1
    middle = (most + 1) // 2
    low, high = (np.minimum(grouped.min(axis=2), 0), np.maximum(grouped.max(axis=2), 0))
    if spec.scheme is Scheme.SYMMETRIC:
        scales = np.maximum(np.maximum(high, -low) / (middle - 1), _MIN_SCALE)
        zeros = np.full(scales.shape, middle, np.float32)
    else:
        scales = np.maximum((high - low) / most, _MIN_SCALE)
        zeros = np.clip(np.rint(-low / scales), 0, most)
    codes = np.rint(grouped / scales[..., None]) + zeros[..., None]
    np.clip(codes, 0, most, out=codes)
    return IntegerGroups(
        codes.astype(np.uint8),
        scales.astype(np.float32),
        zeros.astype(np.uint8),
        weight.shape[1],
    )


def packed(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return the codes of the last axis, for 4 bits two per byte, the even one in the lower half.

    An odd number of codes is filled up with a zero.
    """
    if bits == 8:
        return codes
    widths = [(0, 0)] * (codes.ndim - 1) + [(0, codes.shape[-1] % 2)]
    even = np.pad(codes, widths)
    return np.ascontiguousarray(even[..., ::2] | even[..., 1::2] << 4)


def rounded_inputs(rows: Array, size: int) -> NDArray[np.float32]:
    """Return rows [rows, inputs] as a kernel with INT8 inputs reads them: rounded per group."""
    grouped = _grouped(rows, size)
    scales = np.abs(grouped).max(axis=2, keepdims=True) / _INPUT_LIMIT
    steps = np.rint(grouped / np.where(scales > 0, scales, 1))
    return (steps * scales).reshape(len(rows), -1)[:, : rows.shape[1]]


def _grouped(values: Array, size: int) -> NDArray[np.float32]:
    """Return values [rows, inputs] as [rows, groups, size], filled up with zeros."""
    padded = np.pad(np.asarray(values, np.float32), ((0, 0), (0, -values.shape[1] % size)))
    return padded.reshape(len(values), -1, size)
