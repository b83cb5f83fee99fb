"""Packing of codes in the bit orders of kernels and checkpoints."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from neural_mp.adaptors.common.weights.grouped_weight import (
    BitOrder,
    pack_codes,
    pack_words,
    unpack_codes,
)
from neural_mp.adaptors.pytorch.graph.qdq_ops import unpack_stored_codes

GENERATOR = np.random.default_rng(0)
UPPER, LOWER = BitOrder


def _as_text(codes: np.ndarray, bits: int, order: BitOrder) -> str:
    """Return the bits of a row of codes, in the order of bits within a byte from the upper one."""
    fields = [f"{code:0{bits}b}" for code in codes]
    if order is UPPER:
        return "".join(fields)
    text = "".join(reversed(fields))
    parts = [text[start : start + 8] for start in range(0, len(text), 8)]
    return "".join(reversed(parts))


@pytest.mark.parametrize("order", BitOrder)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_bits_follow_each_other_from_the_upper_or_the_lower_end(bits, order):
    codes = GENERATOR.integers(2**bits, size=(3, 24)).astype(np.uint8)
    for row, stored in zip(codes, pack_codes(codes, bits, order), strict=True):
        assert "".join(f"{byte:08b}" for byte in stored) == _as_text(row, bits, order)


def test_a_byte_that_is_not_full_is_filled_up_with_zeros():
    codes = np.array([[1, 2, 15], [4, 5, 6]], np.uint8)
    assert pack_codes(codes, 4, LOWER).tolist() == [[0x21, 0x0F], [0x54, 0x06]]
    assert pack_codes(codes, 4, UPPER).tolist() == [[0x12, 0xF0], [0x45, 0x60]]
    assert pack_codes(codes, 8, LOWER) is codes


@pytest.mark.parametrize("order", BitOrder)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_packed_codes_are_unpacked_in_both_orders(bits, order):
    codes = GENERATOR.integers(2**bits, size=(3, 21)).astype(np.uint8)
    assert (unpack_codes(pack_codes(codes, bits, order), bits, 21, order) == codes).all()


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_codes_packed_for_pytorch_are_read_back(bits):
    codes = GENERATOR.integers(2**bits, size=(3, 16)).astype(np.uint8)
    stored = pack_codes(codes, bits, UPPER)
    assert (unpack_stored_codes(torch.from_numpy(stored), bits).numpy() == codes).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_words_hold_the_first_code_in_the_lowest_bits(bits):
    codes = GENERATOR.integers(2**bits, size=(2, 9)).astype(np.uint8)
    words = pack_words(codes, bits).view(np.uint32).astype(np.uint64)
    per_word = 32 // bits
    assert words.shape == (2, -(-9 // per_word))
    for position in range(9):
        field = words[:, position // per_word] >> np.uint64(bits * (position % per_word))
        assert (field % 2**bits == codes[:, position]).all()
