"""Weights in 4 bits: grid, rounding and packing."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from neural_mp.adaptors.common.low_bit_weights import (
    grouped_specs,
    packed,
    round_to_nearest,
    to_bfloat16,
)
from neural_mp.adaptors.pytorch.qdq_ops import codes_of
from neural_mp.core.quant_spec import QuantSpec

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("size", [8, 32, 64])
def test_every_weight_is_within_half_a_step_of_its_rounded_value(scheme, size):
    weight = GENERATOR.normal(0.3, 1, (5, 64)).astype(np.float32)
    spec = QuantSpec("uint4", scheme, "per_group", group_size=size)
    rounded = round_to_nearest(weight, spec)
    assert rounded.group_size == size
    assert rounded.codes.max() <= 15
    steps = np.repeat(rounded.scales, size, axis=1)
    # Scales are rounded to 8 bits: the ends of a range may lie beyond the last code by 8 / 256.
    assert (np.abs(rounded.floats() - weight) <= steps * (0.5 + 8 / 256)).all()
    if scheme == "symmetric":
        assert not rounded.offsets.any()
        assert (round_to_nearest(-weight, spec).floats() == -rounded.floats()).all()


def test_a_weight_on_the_grid_is_unchanged():
    spec = QuantSpec.parse("uint4 asymmetric per_group 16")
    weight = GENERATOR.normal(size=(4, 32)).astype(np.float32)
    once = round_to_nearest(weight, spec)
    codes = once.codes.reshape(4, 2, 16)
    assert (codes.min(axis=2) == 0).all()
    assert (codes.max(axis=2) == 15).all()
    assert (round_to_nearest(once.floats(), spec).floats() == once.floats()).all()


def test_zeros_are_kept_and_constant_groups_up_to_the_rounding_of_their_scale():
    spec = QuantSpec.parse("uint4 asymmetric per_group 8")
    weight = np.concatenate([np.zeros((2, 8)), np.full((2, 8), 0.5)], axis=1).astype(np.float32)
    rounded = round_to_nearest(weight, spec).floats()
    assert (rounded[:, :8] == 0).all()
    np.testing.assert_allclose(rounded, weight, rtol=2**-8)


def test_offsets_are_whole_steps_as_formats_with_integer_zero_points_need_them():
    weight = GENERATOR.normal(0.5, 1, (5, 64)).astype(np.float32)
    rounded = round_to_nearest(weight, QuantSpec.parse("uint4 asymmetric per_group 16"))
    zero_points = 8 - rounded.offsets / rounded.scales
    assert (np.rint(zero_points) >= 0).all()
    assert (np.rint(zero_points) <= 15).all()
    np.testing.assert_allclose(zero_points, np.rint(zero_points), atol=8 * 2**-8)


def test_scales_and_offsets_are_rounded_as_bfloat16_is():
    values = GENERATOR.normal(size=10_000).astype(np.float32)
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (to_bfloat16(values) == expected).all()


def test_packed_codes_are_read_back():
    codes = GENERATOR.integers(16, size=(3, 10)).astype(np.uint8)
    stored = packed(codes)
    assert stored.shape == (3, 5)
    assert stored[0, 0] == codes[0, 0] * 16 + codes[0, 1]
    assert (codes_of(torch.from_numpy(stored)).numpy() == codes).all()


def test_a_group_size_divides_the_inputs():
    assert [spec.group_size for spec in grouped_specs(192)] == [64, 32]
    assert [spec.group_size for spec in grouped_specs(256)] == [128, 64, 32]
    assert grouped_specs(100) == ()
