"""Weights in groups of inputs with a scale and an offset each, their rounding and packing.

A weight [outputs, inputs] has one scale and one offset per output and group of inputs:
weight ≈ (code - middle) · scale + offset, codes 0 to 15 and middle 8 for 4 bits. An offset of whole
steps, (middle - zero point) · scale, is the form with integer zero points:
weight ≈ (code - zero point) · scale. The last group is shorter if the group size does not divide
the inputs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.enums import Granularity, KernelInputs, QuantDType, Scheme
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

_MIN_SCALE = 1e-12
#: From this number of bits on, a code stands for 0.
_LEAST_BITS_WITH_ZERO = 3
_PARTS_OF_HALF_THE_CODES = 128
#: Values of a weight that are rounded at once, in whole rows, and the least number of rows.
VALUES_AT_ONCE, _LEAST_ROWS = 1 << 19, 128
#: Largest magnitude of an input rounded to INT8.
_INPUT_LIMIT = 127

Floats = NDArray[np.float32]
Codes = NDArray[np.uint8]


class GroupParameters(Enum):
    """Parameters of a group, as kernels read them.

    `BFLOAT16`: scales and offsets exact in bfloat16. `ZERO_POINTS`: scales in float32 and zero
    points that are codes.
    """

    BFLOAT16 = "bfloat16"
    ZERO_POINTS = "zero_points"


@dataclass(frozen=True)
class InputMoments:
    """Moments of a layer's inputs.

    Attributes:
        products: float32 [inputs, inputs], mean of x xᵀ.
        magnitudes: float32 [inputs], mean of |x|.
    """

    products: Floats
    magnitudes: Floats


class Groups(Protocol):
    """Codes and parameters of the groups of a weight."""

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""

    @property
    def codes(self) -> Codes:
        """The codes, uint8 [outputs, inputs]."""

    @property
    def scales(self) -> Floats:
        """The scales, float32 [outputs, groups]."""

    @property
    def offsets(self) -> Floats:
        """The offsets, float32 [outputs, groups]."""


@dataclass(frozen=True)
class CodedGroups:
    """Groups in memory, a byte per code; see `Groups`."""

    codes: Codes
    scales: Floats
    offsets: Floats

    @property
    def shape(self) -> tuple[int, int]:
        """Number of outputs and of inputs."""
        outputs, inputs = self.codes.shape
        return int(outputs), int(inputs)


@dataclass(frozen=True)
class _ScaledGroups:
    """Groups whose outputs are multiplied by factors, float32 [outputs]; see `Groups`."""

    groups: Groups
    factors: Floats

    @property
    def shape(self) -> tuple[int, int]:
        return self.groups.shape

    @property
    def codes(self) -> Codes:
        return self.groups.codes

    @property
    def scales(self) -> Floats:
        return self.groups.scales * self.factors[:, None]

    @property
    def offsets(self) -> Floats:
        return self.groups.offsets * self.factors[:, None]


@dataclass(frozen=True)
class GroupedWeight:
    """A weight in groups along its last axis.

    Attributes:
        groups: codes and parameters of the groups, in memory or where they are read from.
        group_size: number of consecutive inputs per scale.
        input_factors: float32 [inputs], exact in bfloat16, which the layer multiplies its inputs
            by; None for 1.
    """

    groups: Groups
    group_size: int
    bits: int = 4
    input_factors: Floats | None = None

    @property
    def codes(self) -> Codes:
        """The codes, uint8 [outputs, inputs], 0 to 2^bits - 1."""
        return self.groups.codes

    @property
    def scales(self) -> Floats:
        """The scales of the groups, float32 [outputs, groups]."""
        return self.groups.scales

    @property
    def offsets(self) -> Floats:
        """The offsets of the groups, float32 [outputs, groups]."""
        return self.groups.offsets

    @property
    def num_inputs(self) -> int:
        """Number of inputs."""
        return self.groups.shape[1]

    @property
    def steps(self) -> Floats:
        """The zero points of the groups, as fractions of steps."""
        return middle_code(self.bits) - self.offsets / self.scales

    @property
    def zero_points(self) -> Codes:
        """The zero points nearest to the offsets, uint8 [outputs, groups]."""
        return np.clip(np.rint(self.steps), 0, max_code(self.bits)).astype(np.uint8)

    def take_rows(self, part: slice) -> GroupedWeight:
        """Return the weight of some outputs."""
        groups = CodedGroups(self.codes[part], self.scales[part], self.offsets[part])
        return replace(self, groups=groups)

    def with_outputs(self, chosen: NDArray[np.bool_], other: GroupedWeight) -> GroupedWeight:
        """Return the weight with the `chosen` outputs of another one of the same form."""
        codes, scales, offsets = (
            np.where(chosen[:, None], getattr(other, name), getattr(self, name))
            for name in ("codes", "scales", "offsets")
        )
        return replace(self, groups=CodedGroups(codes, scales, offsets))

    def with_scaled_outputs(self, factors: Floats) -> GroupedWeight:
        """Return the weight whose outputs are multiplied by factors, float32 [outputs]."""
        return replace(self, groups=_ScaledGroups(self.groups, factors))

    def full_groups(self) -> Codes:
        """Return the codes as [outputs, groups, group size], filled up with zero points."""
        codes = in_groups(self.codes, self.group_size)
        filled = -self.num_inputs % self.group_size
        if filled:
            codes[:, -1, -filled:] = self.zero_points[:, -1:]
        return codes

    def stored_floats(self) -> Floats:
        """Return the weight that multiplies the scaled inputs, float32 [outputs, inputs]."""
        values = self.codes.astype(np.float32)
        values -= middle_code(self.bits)
        grouped = in_groups(values, self.group_size)
        grouped *= self.scales[..., None]
        grouped += self.offsets[..., None]
        return np.ascontiguousarray(grouped.reshape(len(values), -1)[:, : self.num_inputs])

    def to_floats(self) -> Floats:
        """Return the weight with the factors of its inputs, float32 [outputs, inputs]."""
        weight = self.stored_floats()
        if self.input_factors is not None:
            weight *= self.input_factors
        return weight


def iterate_row_parts(shape: Sequence[int]) -> Iterator[slice]:
    """Yield parts of the rows of a weight, which limit the memory of intermediate results."""
    rows, inputs = shape
    count = max(_LEAST_ROWS, VALUES_AT_ONCE // max(inputs, 1))
    for first in range(0, max(rows, 1), count):
        yield slice(first, first + count)


def join_row_parts(parts: Iterable[GroupedWeight]) -> GroupedWeight:
    """Return the weight whose parts, one after another, `GroupedWeight.take_rows` returns."""
    weights = list(parts)
    if len(weights) == 1:
        return weights[0]
    codes = np.concatenate([part.codes for part in weights])
    scales = np.concatenate([part.scales for part in weights])
    offsets = np.concatenate([part.offsets for part in weights])
    return replace(weights[0], groups=CodedGroups(codes, scales, offsets))


@dataclass(frozen=True)
class Quantizer:
    """Rounding of weights [outputs, inputs] to a grid.

    Attributes:
        spec: bits, scheme and group size.
        parameters: the parameters that the kernel reads.
    """

    spec: QuantSpec
    parameters: GroupParameters = GroupParameters.BFLOAT16

    @property
    def bits(self) -> int:
        """Bits per code."""
        return self.spec.dtype.bits

    @property
    def group_size(self) -> int:
        """Number of consecutive inputs per scale."""
        assert self.spec.group_size is not None
        return self.spec.group_size

    @property
    def without_learning(self) -> Quantizer:
        """The quantizer without learned rounding."""
        return replace(self, spec=self.spec.unlearned)

    def round_to_nearest(self, weight: Array) -> GroupedWeight:
        """Round a weight to nearest."""
        rows = (weight[part] for part in iterate_row_parts(weight.shape))
        return join_row_parts(self.round_on_grid(block, *self.fit_grid(block)) for block in rows)

    def round_on_grid(
        self, weight: Array, scales: Floats, offsets: Floats, factors: Floats | None = None
    ) -> GroupedWeight:
        """Round a weight to the nearest codes of given groups; `factors` are of its inputs."""
        grouped = in_groups(np.asarray(weight, np.float32), self.group_size)
        codes = self.find_nearest_codes(grouped, scales[..., None], offsets[..., None])
        codes = codes.reshape(len(weight), -1)[:, : weight.shape[1]]
        return self.make_weight(np.ascontiguousarray(codes), scales, offsets, factors)

    def make_weight(
        self, codes: Codes, scales: Floats, offsets: Floats, factors: Floats | None = None
    ) -> GroupedWeight:
        """Return a weight of codes [outputs, inputs] on a grid of this kind."""
        groups = CodedGroups(codes, scales, offsets)
        return GroupedWeight(groups, self.group_size, self.bits, factors)

    def find_nearest_codes(self, values: Floats, scales: Floats, offsets: Floats) -> Codes:
        """Return the codes nearest to values; scales and offsets broadcast against them."""
        steps = values - offsets
        steps /= scales
        np.rint(steps, out=steps)
        steps += middle_code(self.bits)
        return np.clip(steps, 0, max_code(self.bits), out=steps).astype(np.uint8)

    def fit_grid(self, weight: Array) -> tuple[Floats, Floats]:
        """Return scales and offsets [outputs, groups] that cover the range of each group."""
        grouped = in_groups(np.asarray(weight, np.float32), self.group_size)
        return self.grid_of(grouped.min(axis=2), grouped.max(axis=2))

    def grid_of(self, low: Floats, high: Floats) -> tuple[Floats, Floats]:
        """Return scales and offsets of ranges.

        Asymmetric offsets are whole numbers of steps, as formats with integer zero points store
        them, and such ranges are extended to hold 0. With 4 codes and free offsets, half a step
        would cost too much: offsets are free, see `free_offsets`.
        """
        asymmetric = self.spec.scheme is Scheme.ASYMMETRIC
        most = max_code(self.bits)
        if asymmetric and not self._has_zero:
            scales = self.round_parameters(np.maximum((high - low) / most, _MIN_SCALE))
            # Around the middle of the range, so that both ends share the rounding of the scale.
            return scales, self.free_offsets((low + high) / 2 + scales / 2, scales)
        low, high, middle = np.minimum(low, 0), np.maximum(high, 0), middle_code(self.bits)
        if not asymmetric:
            scales = np.maximum(np.maximum(high, -low) / (middle - 1), _MIN_SCALE)
            return self.round_parameters(scales), np.zeros_like(scales)
        scales = self.round_parameters(np.maximum((high - low) / most, _MIN_SCALE))
        steps = np.clip(np.rint(low / scales + middle), middle - most, middle)
        return scales, self.round_parameters(steps * scales)

    def free_offsets(self, values: Array, scales: Floats) -> Floats:
        """Round offsets that need not be whole steps.

        With 4 codes, to parts of a step that a byte holds, as far as they fit; with more codes,
        to the type of the parameters only.
        """
        if self._has_zero:
            return self.round_parameters(values)
        parts = np.rint(encode_offset_bytes(values / scales, self.bits))
        in_range = np.abs(parts) <= np.iinfo(np.int8).max
        return self.round_parameters(
            np.where(in_range, decode_offset_bytes(parts, self.bits) * scales, values)
        )

    def round_parameters(self, values: Array) -> Floats:
        """Round values to the type of the parameters."""
        if self.parameters is GroupParameters.BFLOAT16:
            return to_bfloat16(values)
        return np.asarray(values, np.float32)

    @property
    def _has_zero(self) -> bool:
        whole = self.parameters is GroupParameters.ZERO_POINTS
        return whole or self.bits >= _LEAST_BITS_WITH_ZERO


def middle_code(bits: int) -> int:
    """Return the code whose value is the offset."""
    return int(1 << (bits - 1))


def encode_offset_bytes(steps: Array, bits: int) -> Array:
    """Return offsets, in steps, as parts of a step that a byte holds.

    They count from half a step, around which offsets of ranges that hold 0 lie, whole or not:
    -7 to 8 steps of 4 bits are ±120 parts.
    """
    return (steps - 0.5) * (_PARTS_OF_HALF_THE_CODES // middle_code(bits))


def decode_offset_bytes(held: Array, bits: int) -> Array:
    """Return the offsets of `encode_offset_bytes` in steps."""
    return held / (_PARTS_OF_HALF_THE_CODES // middle_code(bits)) + 0.5


def max_code(bits: int) -> int:
    """Return the largest code."""
    return int((1 << bits) - 1)


def to_bfloat16(values: Array) -> Floats:
    """Round float32 values to the nearest bfloat16, ties to even, as float32."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + 0x7FFF + ((bits >> 16) & 1)
    return (rounded & np.uint32(0xFFFF0000)).view(np.float32)


def in_groups(values: Array, size: int) -> Array:
    """Return values [rows, inputs] as [rows, groups, size], filled up with zeros."""
    filled = -values.shape[1] % size
    padded = np.pad(values, ((0, 0), (0, filled))) if filled else values
    return padded.reshape(len(values), -1, size)


def round_grouped_inputs(rows: Array, size: int) -> Floats:
    """Return rows [rows, inputs] as a kernel with INT8 inputs reads them: rounded per group."""
    grouped = in_groups(np.asarray(rows, np.float32), size)
    scales = np.abs(grouped).max(axis=2, keepdims=True) / _INPUT_LIMIT
    steps = np.rint(grouped / np.where(scales > 0, scales, 1))
    return (steps * scales).reshape(len(rows), -1)[:, : rows.shape[1]]


#: Group sizes in the order of preference: the first is common to all kernels, the smallest and
#: fastest, the last the most accurate.
GROUP_SIZES = (128, 64, 32)


def group_spec(
    bits: int,
    size: int,
    inputs: KernelInputs = KernelInputs.FLOAT,
    scheme: Scheme = Scheme.ASYMMETRIC,
) -> QuantSpec:
    """Return the quantization of a weight in groups of a size; symmetric weights are signed."""
    sign = "" if scheme is Scheme.SYMMETRIC else "u"
    dtype = QuantDType(f"{sign}int{bits}")
    return QuantSpec(dtype, scheme, Granularity.PER_GROUP, group_size=size, inputs=inputs)


def input_group_size(spec: QuantSpec, inputs: int) -> int:
    """Return the number of consecutive inputs that a kernel rounds to INT8 with one scale.

    The group of the weight, or for one scale per output, the largest of `GROUP_SIZES` that divides
    the inputs, otherwise the smallest.
    """
    fitting = (size for size in GROUP_SIZES if inputs % size == 0)
    return spec.group_size or next(fitting, min(GROUP_SIZES))


def list_fitting_specs(
    inputs: int, bits: Iterable[int] = (4,), scheme: Scheme = Scheme.ASYMMETRIC
) -> tuple[QuantSpec, ...]:
    """Return the quantizations whose group size divides the inputs, best first."""
    return tuple(
        group_spec(width, size, scheme=scheme)
        for width in bits
        for size in GROUP_SIZES
        if inputs % size == 0
    )


def iterate_product_specs(
    inputs: KernelInputs, fewer_bits: Iterable[int] = ()
) -> Iterator[QuantSpec]:
    """Yield the quantizations of products: 4 bits, the fastest scheme first, 8 bits, fewer bits."""
    for scheme in (Scheme.SYMMETRIC, Scheme.ASYMMETRIC):
        for size in GROUP_SIZES:
            yield group_spec(4, size, inputs, scheme)
    for bits in (8, *fewer_bits):
        for size in GROUP_SIZES:
            yield group_spec(bits, size, inputs)


class BitOrder(Enum):
    """Place of the first code: the upper bits of a byte, or the lower bits."""

    UPPER_FIRST = "upper_first"
    LOWER_FIRST = "lower_first"


def pack_codes(codes: NDArray[np.uint8], bits: int, order: BitOrder) -> NDArray[np.uint8]:
    """Return the codes of the last axis as bytes, filled up with zeros.

    Codes of 3 bits are a sequence of bits, eight codes in three bytes.
    """
    if bits == 8:
        return codes
    if 8 % bits:
        return _pack_code_bits(codes, bits, order)
    per_byte = 8 // bits
    filled = -codes.shape[-1] % per_byte
    if filled:
        codes = np.pad(codes, [(0, 0)] * (codes.ndim - 1) + [(0, filled)])
    shifts = range(0, 8, bits)
    upper = order is BitOrder.UPPER_FIRST
    result = np.zeros((*codes.shape[:-1], codes.shape[-1] // per_byte), np.uint8)
    for position, shift in enumerate(reversed(shifts) if upper else shifts):
        result |= codes[..., position::per_byte] << np.uint8(shift)
    return result


def _bit_shifts(bits: int, order: BitOrder) -> tuple[NDArray[np.uint8], Literal["big", "little"]]:
    """Return the shifts of a code's bits, the first one first, and numpy's name of the order."""
    shifts = np.arange(bits, dtype=np.uint8)
    return (shifts[::-1], "big") if order is BitOrder.UPPER_FIRST else (shifts, "little")


def _pack_code_bits(codes: NDArray[np.uint8], bits: int, order: BitOrder) -> NDArray[np.uint8]:
    shifts, bit_order = _bit_shifts(bits, order)
    rows = codes.reshape(-1, codes.shape[-1])
    result = np.empty((len(rows), -(-rows.shape[1] * bits // 8)), np.uint8)
    for part in iterate_row_parts(rows.shape):  # a byte per bit of them is made
        single = rows[part, :, None] >> shifts & 1
        flat = single.reshape(len(single), -1)
        result[part] = np.packbits(flat, axis=-1, bitorder=bit_order)
    return result.reshape(*codes.shape[:-1], result.shape[1])


def unpack_codes(
    stored: NDArray[np.uint8], bits: int, columns: int, order: BitOrder
) -> NDArray[np.uint8]:
    """Return the codes [rows, columns] that `pack_codes` stored as bytes."""
    if bits == 8:
        return np.array(stored[..., :columns])
    if 8 % bits:
        return _unpack_code_bits(stored, bits, columns, order)
    upper = order is BitOrder.UPPER_FIRST
    per_byte = 8 // bits
    codes = np.empty((*stored.shape[:-1], stored.shape[-1] * per_byte), np.uint8)
    shifts_of_bytes = range(0, 8, bits)
    for position, shift in enumerate(reversed(shifts_of_bytes) if upper else shifts_of_bytes):
        codes[..., position::per_byte] = stored >> np.uint8(shift) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(codes[..., :columns])


def _unpack_code_bits(
    stored: NDArray[np.uint8], bits: int, columns: int, order: BitOrder
) -> NDArray[np.uint8]:
    shifts, bit_order = _bit_shifts(bits, order)
    rows = stored.reshape(-1, stored.shape[-1])
    codes = np.empty((len(rows), columns), np.uint8)
    for part in iterate_row_parts(codes.shape):
        single = np.unpackbits(rows[part], axis=-1, bitorder=bit_order)
        single = single[:, : columns * bits].reshape(-1, columns, bits)
        np.bitwise_or.reduce(single << shifts, axis=-1, out=codes[part])
    return codes.reshape(*stored.shape[:-1], columns)


def pack_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Return codes [rows, columns] as int32 words, the first column in the lowest bits."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    stored = pack_codes(padded, bits, BitOrder.LOWER_FIRST)
    return np.ascontiguousarray(stored).view("<i4")
