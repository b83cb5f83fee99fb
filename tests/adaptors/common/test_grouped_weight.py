"""Weights in groups: grids, rounding, groups that are not full, inputs rounded by kernels."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupParameters,
    Quantizer,
    list_fitting_specs,
    round_grouped_inputs,
    to_bfloat16,
)
from neural_mp.core.quant_spec import QuantSpec

GENERATOR = np.random.default_rng(0)
BFLOAT16, ZERO_POINTS = GroupParameters


def _quantizer(text: str, parameters: GroupParameters = BFLOAT16) -> Quantizer:
    return Quantizer(QuantSpec.parse(text), parameters)


@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("size", [8, 32, 64])
def test_every_weight_is_within_half_a_step_of_its_rounded_value(scheme, size):
    weight = GENERATOR.normal(0.3, 1, (5, 64)).astype(np.float32)
    quantizer = _quantizer(f"uint4 {scheme} per_group {size}")
    rounded = quantizer.round_to_nearest(weight)
    assert rounded.group_size == size
    assert rounded.codes.max() <= 15
    steps = np.repeat(rounded.scales, size, axis=1)
    # Scales are rounded to 8 bits: the ends of a range may lie beyond the last code by 8 / 256.
    assert (np.abs(rounded.to_floats() - weight) <= steps * (0.5 + 8 / 256)).all()
    if scheme == "symmetric":
        assert not rounded.offsets.any()
        assert (quantizer.round_to_nearest(-weight).to_floats() == -rounded.to_floats()).all()


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("inputs", [64, 83])
def test_codes_less_zero_points_times_scales_are_the_weight(bits, scheme, inputs):
    weight = GENERATOR.normal(0.3, 1, (5, inputs)).astype(np.float32)
    stored = _quantizer(f"uint{bits} {scheme} per_group 32", ZERO_POINTS).round_to_nearest(weight)
    assert stored.codes.shape == weight.shape
    assert stored.codes.max() < 2**bits
    steps = np.repeat(stored.scales, 32, axis=1)[:, :inputs]
    zeros = np.repeat(stored.zero_points, 32, axis=1)[:, :inputs].astype(np.float32)
    dequantized = (stored.codes - zeros) * steps
    np.testing.assert_allclose(stored.to_floats(), dequantized, atol=1e-5)
    # A zero point is rounded, too: the ends of a range may lie half a step beyond the codes.
    assert (np.abs(dequantized - weight) <= steps * 1.0001).all()
    if bits > 2:
        assert (np.abs(dequantized - weight) <= steps * 0.5001).mean() > 0.95
    if scheme == "symmetric":
        assert (stored.zero_points == 2 ** (bits - 1)).all()


def test_a_group_that_is_not_full_is_filled_up_with_zeros():
    weight = GENERATOR.normal(0.3, 1, (5, 83)).astype(np.float32)
    stored = _quantizer("uint4 asymmetric per_group 32", ZERO_POINTS).round_to_nearest(weight)
    groups = stored.full_groups()
    assert groups.shape == (5, 3, 32)
    assert (groups.reshape(5, 96)[:, :83] == stored.codes).all()
    assert (groups[:, 2, 19:] == stored.zero_points[:, 2:]).all()


def test_a_weight_on_the_grid_is_unchanged():
    quantizer = _quantizer("uint4 asymmetric per_group 16")
    weight = GENERATOR.normal(size=(4, 32)).astype(np.float32)
    once = quantizer.round_to_nearest(weight)
    codes = once.codes.reshape(4, 2, 16)
    assert (codes.min(axis=2) == 0).all()
    assert (codes.max(axis=2) == 15).all()
    assert (quantizer.round_to_nearest(once.to_floats()).to_floats() == once.to_floats()).all()


@pytest.mark.parametrize(("parameters", "error"), [(BFLOAT16, 2**-8), (ZERO_POINTS, 1e-6)])
@pytest.mark.parametrize("value", [0.5, 3.0, -3.0])
def test_zeros_are_kept_and_constant_groups_as_far_as_scales_are_exact(parameters, error, value):
    quantizer = _quantizer("uint4 asymmetric per_group 8", parameters)
    weight = np.concatenate([np.zeros((2, 8)), np.full((2, 8), value)], axis=1).astype(np.float32)
    rounded = quantizer.round_to_nearest(weight).to_floats()
    assert (rounded[:, :8] == 0).all()
    np.testing.assert_allclose(rounded, weight, rtol=error)


def test_offsets_are_whole_steps_as_formats_with_integer_zero_points_need_them():
    weight = GENERATOR.normal(0.5, 1, (5, 64)).astype(np.float32)
    rounded = _quantizer("uint4 asymmetric per_group 16").round_to_nearest(weight)
    whole = np.rint(rounded.steps)
    assert (whole >= 0).all()
    assert (whole <= 15).all()
    np.testing.assert_allclose(rounded.steps, whole, atol=8 * 2**-8)


def test_scales_and_offsets_are_rounded_as_bfloat16_is():
    values = GENERATOR.normal(size=10_000).astype(np.float32)
    expected = values.astype(ml_dtypes.bfloat16).astype(np.float32)
    assert (to_bfloat16(values) == expected).all()


def test_free_offsets_of_2_bits_fit_in_a_byte_and_cost_no_accuracy():
    weight = GENERATOR.normal(0.1, 1, (64, 256)).astype(np.float32)
    nearest = _quantizer("uint2 asymmetric per_group 32").round_to_nearest(weight)
    parts = (nearest.offsets / nearest.scales - 0.5) * 64
    assert np.abs(parts).max() < 127
    assert np.abs(parts - np.rint(parts)).max() < 0.5  # offsets are rounded to bfloat16, too
    low, high = weight.reshape(64, 8, 32).min(2), weight.reshape(64, 8, 32).max(2)
    free = to_bfloat16((low + high) / 2 + nearest.scales / 2)
    error, least = (
        np.square(candidate.to_floats() - weight).mean()
        for candidate in (
            nearest,
            _quantizer("uint2 asymmetric per_group 32").round_on_grid(weight, nearest.scales, free),
        )
    )
    assert error < 1.001 * least


def test_a_group_far_from_zero_keeps_its_offset():
    weight = GENERATOR.normal(50, 0.1, (4, 32)).astype(np.float32)
    nearest = _quantizer("uint2 asymmetric per_group 32").round_to_nearest(weight)
    assert np.abs(nearest.to_floats() - weight).max() < 0.4


def test_a_group_size_divides_the_inputs():
    assert [spec.group_size for spec in list_fitting_specs(192)] == [64, 32]
    assert [spec.group_size for spec in list_fitting_specs(256)] == [128, 64, 32]
    assert list_fitting_specs(100) == ()


def test_inputs_are_rounded_to_127_steps_of_each_row_and_group():
    rows = GENERATOR.normal(size=(3, 70)).astype(np.float32)
    rows[1, :32] = 0
    rounded = round_grouped_inputs(rows, 32)
    for row in range(3):
        for start in (0, 32, 64):
            part, rounded_part = rows[row, start : start + 32], rounded[row, start : start + 32]
            step = np.abs(part).max() / 127
            assert np.abs(part - rounded_part).max() <= step * 0.5001
            assert np.allclose(np.abs(rounded_part).max(), np.abs(part).max())
