"""Moments of inputs: the sums of all rows, and the factor that GPTQ compensates with."""

import numpy as np
import pytest

from neural_mp.adaptors.common.sensitivity import MomentSums
from neural_mp.adaptors.common.weights.grouped_weight import Quantizer
from neural_mp.adaptors.common.weights.weight_corrections import (
    InverseFactor,
    compute_row_errors,
    round_with_corrections,
)
from neural_mp.core.quant_spec import QuantSpec

DRAW = np.random.default_rng(0)
SIZE = 300
ROWS = (DRAW.normal(size=(500, 20)) @ DRAW.normal(size=(20, SIZE))).astype(np.float32)
ROWS[:, 3] *= 64
ROWS[:, 7] = 0


@pytest.fixture(scope="module")
def moments():
    sums = MomentSums.of_size(SIZE)
    for part in (ROWS[:100], ROWS[100:100], ROWS[100:].reshape(20, 20, SIZE)):
        sums.add_inputs(part)
    return sums.finish_moments()


def test_moments_are_the_means_over_all_rows(moments):
    expected = ROWS.T.astype(np.float64) @ ROWS / len(ROWS)
    np.testing.assert_allclose(moments.products, expected, rtol=1e-4, atol=1e-4)
    assert np.array_equal(moments.products, moments.products.T)
    np.testing.assert_allclose(moments.magnitudes, np.abs(ROWS).mean(axis=0), rtol=1e-4)


def test_rows_with_nan_or_inf_are_left_out(moments):
    damaged = ROWS[:3].copy()
    damaged[0, 5], damaged[1, 6], damaged[2, 7] = np.nan, np.inf, -np.inf
    sums = MomentSums.of_size(SIZE)
    sums.add_inputs(np.concatenate([damaged, ROWS]))
    result = sums.finish_moments()
    np.testing.assert_allclose(result.products, moments.products, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(result.magnitudes, moments.magnitudes, rtol=1e-4)


def test_the_factor_is_that_of_the_damped_inverse(moments):
    factor = InverseFactor.from_products(moments.products)
    power = np.diagonal(moments.products).astype(np.float64)
    damped = moments.products + np.diag(np.where(power > 0, 0.01 * power, 1.01))
    damped = damped[np.ix_(factor.order, factor.order)]
    size = np.sqrt(np.diagonal(damped))
    inverse = np.linalg.inv(damped / size / size[:, None])
    product = (factor.upper.T.astype(np.float64) @ factor.upper) * size * size[:, None]
    assert np.abs(product - inverse).max() < 1e-3 * np.abs(inverse).max()
    assert not np.tril(factor.upper, -1).any()


def test_the_factor_for_scaled_inputs_is_that_of_their_moments(moments):
    factors = np.linspace(0.5, 2, SIZE, dtype=np.float32)
    factor = InverseFactor.from_products(moments.products)
    scaled = factor.scale_inputs(factors)
    expected = factor.upper / factors[factor.order]
    assert scaled.upper is factor.upper
    assert np.array_equal(scaled.get_rows(0, SIZE), expected)
    assert np.array_equal(scaled.get_rows(100, 130), expected[100:130, 100:])
    assert np.array_equal(scaled.diagonal, np.diagonal(expected))


def test_awq_and_gptq_factorize_the_moments_once(moments, monkeypatch):
    calls, factorize = [], InverseFactor.from_products
    monkeypatch.setattr(InverseFactor, "from_products", lambda h: calls.append(h) or factorize(h))
    weight = DRAW.normal(size=(16, SIZE)).astype(np.float32)
    quantizer = Quantizer(QuantSpec.parse("uint4 asymmetric per_group 64 awq gptq"))
    round_with_corrections(weight, quantizer, moments)
    assert len(calls) == 1


@pytest.mark.parametrize("words", ["awq", "gptq", "awq gptq"])
def test_a_weight_is_rounded_alike_whole_and_in_parts(moments, words, monkeypatch):
    weight = DRAW.normal(size=(300, SIZE)).astype(np.float32)
    quantizer = Quantizer(QuantSpec.parse(f"uint4 asymmetric per_group 64 {words}"))
    whole = round_with_corrections(weight, quantizer, moments)
    name = "neural_mp.adaptors.common.weights.grouped_weight.VALUES_AT_ONCE"
    monkeypatch.setattr(name, 1)
    parts = round_with_corrections(weight, quantizer, moments)
    assert (whole.codes == parts.codes).mean() > 0.98
    errors = (compute_row_errors(weight, rounded, moments).sum() for rounded in (whole, parts))
    assert next(errors) == pytest.approx(next(errors), rel=0.01)
