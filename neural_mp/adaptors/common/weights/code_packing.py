"""Packing of codes of 2 to 8 bits into bytes and words, in the orders that kernels read."""

from __future__ import annotations

from enum import Enum
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.weights.grouped_weight import row_parts


class BitOrder(Enum):
    """Place of the first code: the upper bits of a byte, or the lower bits."""

    UPPER_FIRST = "upper_first"
    LOWER_FIRST = "lower_first"


def packed(codes: NDArray[np.uint8], bits: int, order: BitOrder) -> NDArray[np.uint8]:
    """Return the codes of the last axis as bytes, filled up with zeros.

    Codes of 3 bits are a sequence of bits, eight codes in three bytes.
    """
    if bits == 8:
        return codes
    if 8 % bits:
        return _packed_bits(codes, bits, order)
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


def _packed_bits(codes: NDArray[np.uint8], bits: int, order: BitOrder) -> NDArray[np.uint8]:
    shifts, bit_order = _bit_shifts(bits, order)
    rows = codes.reshape(-1, codes.shape[-1])
    result = np.empty((len(rows), -(-rows.shape[1] * bits // 8)), np.uint8)
    for part in row_parts(rows.shape):  # a byte per bit of them is made
        single = rows[part, :, None] >> shifts & 1
        flat = single.reshape(len(single), -1)
        result[part] = np.packbits(flat, axis=-1, bitorder=bit_order)
    return result.reshape(*codes.shape[:-1], result.shape[1])


def unpacked(
    stored: NDArray[np.uint8], bits: int, columns: int, order: BitOrder
) -> NDArray[np.uint8]:
    """Return the codes [rows, columns] that `packed` stored as bytes."""
    if bits == 8:
        return np.array(stored[..., :columns])
    if 8 % bits:
        return _unpacked_bits(stored, bits, columns, order)
    upper = order is BitOrder.UPPER_FIRST
    per_byte = 8 // bits
    codes = np.empty((*stored.shape[:-1], stored.shape[-1] * per_byte), np.uint8)
    shifts_of_bytes = range(0, 8, bits)
    for position, shift in enumerate(reversed(shifts_of_bytes) if upper else shifts_of_bytes):
        codes[..., position::per_byte] = stored >> np.uint8(shift) & np.uint8((1 << bits) - 1)
    return np.ascontiguousarray(codes[..., :columns])


def _unpacked_bits(
    stored: NDArray[np.uint8], bits: int, columns: int, order: BitOrder
) -> NDArray[np.uint8]:
    shifts, bit_order = _bit_shifts(bits, order)
    rows = stored.reshape(-1, stored.shape[-1])
    codes = np.empty((len(rows), columns), np.uint8)
    for part in row_parts(codes.shape):
        single = np.unpackbits(rows[part], axis=-1, bitorder=bit_order)
        single = single[:, : columns * bits].reshape(-1, columns, bits)
        np.bitwise_or.reduce(single << shifts, axis=-1, out=codes[part])
    return codes.reshape(*stored.shape[:-1], columns)


def packed_words(codes: NDArray[np.uint8], bits: int) -> NDArray[np.int32]:
    """Return codes [rows, columns] as int32 words, the first column in the lowest bits."""
    padded = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    stored = packed(padded, bits, BitOrder.LOWER_FIRST)
    return np.ascontiguousarray(stored).view("<i4")
