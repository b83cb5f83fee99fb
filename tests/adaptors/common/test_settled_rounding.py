"""Rounding by columns: no single code is better, and the error of wide layers beside descent."""

from dataclasses import replace

import numpy as np
import pytest

from neural_mp.adaptors.common.weights import adaround
from neural_mp.adaptors.common.weights.adaround import (
    CodeChoice,
    LayerError,
    WeightGrid,
    compensate_codes,
    reconstruct_layer_weight,
    settle_codes,
)
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.reconstruction import MomentsOfRows

GROUPS, OUTPUTS, INPUTS, ROWS = 2, 24, 100, 3000
TOLERANCE = 1e-7


def layer_of(outputs: int, inputs: int) -> tuple[np.ndarray, LayerError]:
    """Return a weight and the error of its results on correlated, rounded inputs."""
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(GROUPS, outputs, inputs)).astype(np.float32)
    mixed = rng.normal(size=(GROUPS, ROWS, inputs)) @ rng.normal(size=(GROUPS, inputs, inputs))
    exact = np.maximum(mixed, 0).astype(np.float32)
    rounded = np.rint(exact / 0.5).astype(np.float32) * np.float32(0.5)
    results = exact @ weight.swapaxes(1, 2)
    return weight, LayerError(
        rounded.swapaxes(1, 2) @ rounded / ROWS,
        results.swapaxes(1, 2) @ rounded / ROWS,
        (results**2).mean(axis=1),
    )


@pytest.fixture(scope="module")
def layer():
    return layer_of(OUTPUTS, INPUTS)


def choice_of(weight: np.ndarray, error: LayerError, grid: WeightGrid) -> CodeChoice:
    scales = grid.full_range_scales(weight)
    position = np.clip(weight / scales, -grid.limit, grid.limit)
    free = (np.abs(position) < grid.limit).astype(np.float32)
    return CodeChoice(np.floor(position), free, scales, error.products, error.targets)


def exactly(error: LayerError, weight: np.ndarray) -> np.ndarray:
    """Return the mean squared errors, in float64 and relative to the squares of the results."""
    products, targets, power = (
        array.astype(np.float64) for array in (error.products, error.targets, error.power)
    )
    crossed = np.einsum("goi,goi->go", weight @ products - 2 * targets, weight)
    return (crossed + power) / power


@pytest.mark.parametrize("limit", [7, 127])
@pytest.mark.parametrize("start", ["nearest", "compensated"])
def test_no_code_can_change_alone_without_more_error(layer, limit, start):
    weight, error = layer
    grid = WeightGrid(limit)
    choice = choice_of(weight, error, grid)
    codes = compensate_codes(weight, choice)
    if start == "nearest":
        codes = grid.round_to_nearest(weight, choice.scales).codes
    result = settle_codes(codes, choice)
    least = exactly(error, result * choice.scales)
    assert np.all(least <= exactly(error, codes * choice.scales) + TOLERANCE)
    for column in range(INPUTS):
        neighbour = result.copy()
        raised = result[:, :, column] == choice.low[:, :, column]
        neighbour[:, :, column] += np.where(raised, 1, -1) * choice.is_free[:, :, column]
        assert np.all(exactly(error, neighbour * choice.scales) >= least - TOLERANCE)


@pytest.mark.parametrize("limit", [7, 127])
def test_codes_stay_next_to_the_weight(layer, limit):
    weight, error = layer
    choice = choice_of(weight, error, WeightGrid(limit))
    codes = settle_codes(compensate_codes(weight, choice), choice)
    assert np.all((codes == choice.low) | (codes == choice.low + choice.is_free))
    assert np.abs(codes).max() == limit


@pytest.mark.parametrize("limit", [7, 127])
def test_a_wide_layer_has_nearly_the_error_that_descent_would_reach(layer, limit, monkeypatch):
    weight, error = layer
    grid = WeightGrid(limit)

    def learned() -> float:
        result = reconstruct_layer_weight(
            weight, grid, error, LearnOptions(), rounding=True, scales=False
        )
        return float(error.evaluate_weight(result.to_floats()).sum())

    descended = learned()
    monkeypatch.setattr(adaround, "_WIDE", 0.0)
    nearest = float(
        error.evaluate_weight(
            grid.round_to_nearest(weight, grid.full_range_scales(weight)).to_floats()
        ).sum()
    )
    assert learned() < 0.1 * nearest + 0.9 * descended


def test_inputs_that_hardly_vary_have_the_moments_of_their_differences():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(1, 4, 60)).astype(np.float32)
    rows = (1000 + rng.normal(size=(1, 400, 60))).astype(np.float32)
    sums = MomentsOfRows.zeros_like(weight)
    for part in np.array_split(rows, 4, axis=1):
        sums.add_rows(weight, part, part)
    error = sums.compute_error(centered=True)
    expected = np.cov(rows[0].astype(np.float64), rowvar=False, bias=True)
    np.testing.assert_allclose(error.products[0], expected, atol=1e-3)
    assert np.linalg.eigvalsh(error.products[0]).min() > 0
    whole = sums.compute_error(centered=False)
    np.testing.assert_allclose(whole.products[0], rows[0].T @ rows[0] / 400, rtol=1e-5)
    assert sums.compute_lost_mean(weight) == pytest.approx(0, abs=0.1)


def test_products_without_an_inverse_are_rounded_to_nearest_first(layer):
    weight, error = layer
    choice = choice_of(weight, error, WeightGrid(7))
    broken = replace(choice, products=-choice.products)
    nearest = np.clip(np.rint(weight / choice.scales), -7, 7)
    np.testing.assert_array_equal(compensate_codes(weight, broken), nearest)
