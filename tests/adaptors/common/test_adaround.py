"""Learned rounding and scales of single layers, against exhaustive search and bias correction."""

from itertools import product

import numpy as np
import pytest

from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.adaptors.common.weights.adaround import (
    LayerError,
    WeightGrid,
    reconstruct_layer_weight,
)
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.util.system.watched_thread import TimeLimit

GROUPS, OUTPUTS, INPUTS, ROWS = 2, 16, 36, 2000
OPTIONS = LearnOptions()


def inputs_of(rng: np.random.Generator, inputs: int = INPUTS) -> np.ndarray:
    """Return correlated, positive inputs [groups, rows, inputs], as after a ReLU."""
    mixed = rng.normal(size=(GROUPS, ROWS, inputs)) @ rng.normal(size=(GROUPS, inputs, inputs))
    return np.maximum(mixed + 1, 0).astype(np.float32)


def error_of(rows: np.ndarray, weight: np.ndarray) -> LayerError:
    results = rows @ weight.swapaxes(1, 2)
    products = rows.swapaxes(1, 2) @ rows / ROWS
    return LayerError(products, results.swapaxes(1, 2) @ rows / ROWS, (results**2).mean(axis=1))


def errors(rows: np.ndarray, weight: np.ndarray, rounded: np.ndarray) -> np.ndarray:
    """Return the mean squared error of every output, from the results themselves."""
    return ((rows @ (rounded - weight).swapaxes(1, 2)) ** 2).mean(axis=1)


@pytest.fixture(scope="module")
def layer():
    rng = np.random.default_rng(0)
    weight = rng.normal(size=(GROUPS, OUTPUTS, INPUTS)).astype(np.float32)
    return inputs_of(rng), weight


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("limit", [7, 63, 127])
def test_every_weight_is_rounded_up_or_down(layer, limit, per_channel):
    rows, weight = layer
    grid = WeightGrid(limit, per_channel)
    result = reconstruct_layer_weight(
        weight, grid, error_of(rows, weight), OPTIONS, rounding=True, scales=False
    )
    np.testing.assert_array_equal(result.scales, grid.full_range_scales(weight))
    position = weight / result.scales
    assert np.all(np.abs(result.codes - position) < 1)
    assert np.abs(result.codes).max() == limit


class Steps(TimeLimit):
    """A limit that ends work after a number of steps."""

    left = 0

    def is_reached(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_time_limit_ends_learning_at_a_step_and_the_best_so_far_counts(layer):
    rows, weight = layer
    grid, error = WeightGrid(7), error_of(rows, weight)

    def lost(steps: int) -> float:
        limit = Steps()
        limit.left = steps
        options = LearnOptions(limit=limit)
        result = reconstruct_layer_weight(weight, grid, error, options, rounding=True, scales=False)
        return float(errors(rows, weight, result.to_floats()).sum())

    nearest = grid.round_to_nearest(weight, grid.full_range_scales(weight)).to_floats()
    at_once, late = lost(0), lost(10**6)
    assert late < at_once <= float(errors(rows, weight, nearest).sum())


@pytest.mark.parametrize("limit", [7, 63, 127])
def test_the_error_is_smaller_than_that_of_rounding_to_nearest_with_a_corrected_bias(layer, limit):
    rows, weight = layer
    grid = WeightGrid(limit)
    nearest = grid.round_to_nearest(weight, grid.full_range_scales(weight)).to_floats()
    shift = (rows @ (nearest - weight).swapaxes(1, 2)).mean(axis=1, keepdims=True)
    corrected = ((rows @ (nearest - weight).swapaxes(1, 2) - shift) ** 2).mean(axis=1)
    result = reconstruct_layer_weight(
        weight, grid, error_of(rows, weight), OPTIONS, rounding=True, scales=False
    )
    learned = errors(rows, weight, result.to_floats())
    assert np.all(learned <= errors(rows, weight, nearest) * (1 + 1e-3))
    assert learned.mean() < 0.85 * corrected.mean()


def test_most_of_what_the_best_of_all_roundings_gains_is_gained():
    rng = np.random.default_rng(1)
    weight = rng.normal(size=(GROUPS, OUTPUTS, 8)).astype(np.float32)
    rows, grid = inputs_of(rng, 8), WeightGrid(7)
    error = error_of(rows, weight)
    result = reconstruct_layer_weight(weight, grid, error, OPTIONS, rounding=True, scales=False)
    low = np.floor(weight / result.scales)
    every = [
        error.evaluate_weight(np.minimum(low + up, 7) * result.scales)
        for up in product((0, 1), repeat=8)
    ]
    nearest = error.evaluate_weight(grid.round_to_nearest(weight, result.scales).to_floats())
    best, learned = np.min(every, axis=0), error.evaluate_weight(result.to_floats())
    assert (nearest - learned).mean() > 0.75 * (nearest - best).mean()


@pytest.mark.parametrize("rounding", [True, False])
def test_a_learned_scale_gives_up_an_outlier_that_hardly_counts(layer, rounding):
    rows, weight = layer
    rows, weight = rows.copy(), weight.copy()
    rows[..., 0] *= 1e-3
    weight[..., 0] *= 100
    grid, error = WeightGrid(63), error_of(rows, weight)
    plain, scaled = (
        reconstruct_layer_weight(weight, grid, error, OPTIONS, rounding=rounding, scales=scales)
        for scales in (False, True)
    )
    assert np.median(scaled.scales / plain.scales) < 0.2
    gained = errors(rows, weight, scaled.to_floats()) / errors(rows, weight, plain.to_floats())
    assert gained.max() <= 1
    assert gained.mean() < 0.2


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("scales", [True, False])
def test_a_kernel_finds_the_same_codes_in_the_learned_weight(layer, scales, per_channel):
    rows, weight = layer
    grid = WeightGrid(63, per_channel)
    result = reconstruct_layer_weight(
        weight, grid, error_of(rows, weight), OPTIONS, rounding=True, scales=scales
    )
    axes = (2,) if per_channel else (0, 1, 2)
    again = weight_scales(result.to_floats(), axes, grid.limit)
    np.testing.assert_array_equal(
        round_to_int8(result.to_floats(), again, grid.limit), result.codes
    )


def test_learning_is_repeatable_bit_for_bit(layer):
    rows, weight = layer
    weights = [
        reconstruct_layer_weight(
            weight, WeightGrid(63), error_of(rows, weight), OPTIONS, rounding=True, scales=True
        ).to_floats()
        for _ in range(2)
    ]
    np.testing.assert_array_equal(*weights)
