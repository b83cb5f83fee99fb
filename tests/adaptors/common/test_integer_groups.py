"""Weights in groups with integer zero points: grid, rounding, packing."""

from __future__ import annotations

import numpy as np
import pytest

from neural_mp.adaptors.common.integer_groups import packed, round_in_groups, rounded_inputs
from neural_mp.core.quant_spec import QuantSpec

GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("scheme", ["symmetric", "asymmetric"])
@pytest.mark.parametrize("inputs", [64, 83])
def test_every_weight_is_within_half_a_step_of_its_rounded_value(bits, scheme, inputs):
    weight = GENERATOR.normal(0.3, 1, (5, inputs)).astype(np.float32)
    spec = QuantSpec(f"uint{bits}", scheme, "per_group", group_size=32)
    stored = round_in_groups(weight, spec)
    assert stored.codes.max() < 2**bits
    steps = np.repeat(stored.scales, 32, axis=1)[:, :inputs]
    # A zero point is rounded, too: the ends of a range may lie half a step beyond the codes.
    assert (np.abs(stored.floats() - weight) <= steps * 1.0001).all()
    assert (np.abs(stored.floats() - weight) <= steps * 0.5001).mean() > 0.95
    if scheme == "symmetric":
        assert (stored.zero_points == 2 ** (bits - 1)).all()


@pytest.mark.parametrize("value", [0.0, 3.0, -3.0])
def test_zeros_and_constant_groups_are_kept(value):
    weight = np.full((2, 48), value, np.float32)
    weight[0] = 0
    stored = round_in_groups(weight, QuantSpec.parse("uint4 asymmetric per_group 32"))
    assert np.allclose(stored.floats(), weight, rtol=1e-6)


def test_codes_are_packed_with_the_even_one_in_the_lower_half():
    codes = np.array([[1, 2, 15], [4, 5, 6]], np.uint8)
    assert packed(codes, 4).tolist() == [[0x21, 0x0F], [0x54, 0x06]]
    assert packed(codes, 8) is codes


def test_inputs_are_rounded_to_127_steps_of_each_row_and_group():
    rows = GENERATOR.normal(size=(3, 70)).astype(np.float32)
    rows[1, :32] = 0
    found = rounded_inputs(rows, 32)
    for row in range(3):
        for start in (0, 32, 64):
            part, kept = rows[row, start : start + 32], found[row, start : start + 32]
            step = np.abs(part).max() / 127
            assert np.abs(part - kept).max() <= step * 0.5001
            assert np.allclose(np.abs(kept).max(), np.abs(part).max())
