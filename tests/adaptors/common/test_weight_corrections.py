"""Corrections of weights in 4 bits or less: against exhaustive search and rounding to nearest."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    InputMoments,
    Quantizer,
    to_bfloat16,
)
from neural_mp.adaptors.common.weights.weight_corrections import (
    compute_row_errors,
)
from neural_mp.adaptors.common.weights.weight_corrections import round_with_corrections as corrected
from neural_mp.core.quant_spec import QuantSpec

CORRECTIONS = ("awq", "gptq", "awq gptq")


def _spec(corrections: str, size: int = 32, dtype: str = "uint4") -> QuantSpec:
    return QuantSpec.parse(f"{dtype} asymmetric per_group {size} {corrections}")


def round_to_nearest(weight: np.ndarray, spec: QuantSpec) -> GroupedWeight:
    return Quantizer(spec).round_to_nearest(weight)


def corrected_weight(
    weight: np.ndarray, spec: QuantSpec, moments: InputMoments | None = None
) -> GroupedWeight:
    return corrected(weight, Quantizer(spec), moments)


def _inputs(seed: int, inputs: int, outliers: int = 0) -> np.ndarray:
    """Correlated inputs, some of which are 30 times as large."""
    random = np.random.default_rng(seed)
    rows = random.normal(size=(4 * inputs, inputs)) @ random.normal(size=(inputs, inputs))
    rows[:, :outliers] *= 30
    return rows.astype(np.float32)


def _moments(rows: np.ndarray) -> InputMoments:
    return InputMoments(rows.T @ rows / len(rows), np.abs(rows).mean(axis=0))


def _weight(seed: int, outputs: int, inputs: int, outliers: int = 0) -> np.ndarray:
    weight = np.random.default_rng(seed).normal(size=(outputs, inputs)).astype(np.float32)
    weight[:, :outliers] /= 30
    return weight


@pytest.mark.parametrize("corrections", CORRECTIONS)
@pytest.mark.parametrize("seed", range(4))
def test_no_result_is_further_from_the_layer_than_rounding_to_nearest(seed, corrections):
    rows, weight = _inputs(seed, 64, seed), _weight(seed, 24, 64, seed)
    spec = _spec(corrections)

    def error(rounded):
        return np.square(rows @ (rounded.to_floats() - weight).T).mean(axis=0).sum()

    nearest = error(round_to_nearest(weight, spec))
    result = corrected_weight(weight, spec, _moments(rows))
    assert error(result) <= nearest * (1 + 1e-4)
    gains = seed > 0 or "gptq" in corrections  # without outliers, scaling gains little
    assert error(result) < (0.8 if gains else 1) * nearest


def test_errors_of_outputs_are_those_of_the_inputs_seen():
    rows, weight = _inputs(0, 32), _weight(0, 8, 32)
    rounded = round_to_nearest(weight, _spec("rtn"))
    expected = np.square(rows @ (rounded.to_floats() - weight).T).mean(axis=0)
    np.testing.assert_allclose(
        compute_row_errors(weight, rounded, _moments(rows)), expected, rtol=1e-3
    )


def test_compensated_codes_come_close_to_the_best_of_all_roundings():
    """Exhaustive search over both neighbours of every weight on the same grid."""
    gained = []
    for seed in range(12):
        rows, weight = _inputs(seed, 8), _weight(seed, 1, 8)
        moments, spec = _moments(rows), _spec("gptq", 8)
        (scale,), (offset,) = (values[0] for values in Quantizer(spec).fit_grid(weight))
        below = np.clip(np.floor((weight[0] - offset) / scale), -8, 7)
        errors = []
        for up in itertools.product((0, 1), repeat=8):
            codes = np.clip(below + up, -8, 7)
            change = codes * scale + offset - weight[0]
            errors.append(change @ moments.products @ change)
        nearest = compute_row_errors(weight, round_to_nearest(weight, spec), moments)[0]
        compensated = compute_row_errors(weight, corrected_weight(weight, spec, moments), moments)[
            0
        ]
        gained.append(
            (nearest - compensated) / (nearest - min(errors)) if nearest > min(errors) else 1
        )
    assert np.median(gained) > 0.7


def test_uncorrelated_inputs_leave_nothing_to_compensate_for():
    weight, spec = _weight(0, 8, 64), _spec("gptq")
    alike = InputMoments(np.eye(64, dtype=np.float32), np.ones(64, np.float32))
    result, nearest = corrected_weight(weight, spec, alike), round_to_nearest(weight, spec)
    # Ranges may be narrower, if that reduces the error.
    assert (
        compute_row_errors(weight, result, alike) <= compute_row_errors(weight, nearest, alike)
    ).all()
    unchanged = (result.scales == nearest.scales).all(axis=1)
    assert (result.codes[unchanged] == nearest.codes[unchanged]).all()


def test_scaling_protects_inputs_with_outliers():
    rows, weight = _inputs(1, 64, 4), _weight(1, 24, 64, 4)
    moments = _moments(rows)
    scaled = corrected_weight(weight, _spec("awq"), moments)
    assert scaled.input_factors is not None
    assert scaled.input_factors[:4].max() < scaled.input_factors[4:].min()
    nearest = compute_row_errors(weight, round_to_nearest(weight, _spec("rtn")), moments).sum()
    combined = corrected_weight(weight, _spec("awq gptq"), moments)
    assert compute_row_errors(weight, scaled, moments).sum() < 0.3 * nearest
    assert (
        compute_row_errors(weight, combined, moments).sum()
        < compute_row_errors(weight, scaled, moments).sum()
    )


def test_an_input_that_is_always_zero_is_no_obstacle():
    rows, weight = _inputs(2, 32), _weight(2, 8, 32)
    rows[:, 5] = 0
    for corrections in CORRECTIONS:
        result = corrected_weight(weight, _spec(corrections), _moments(rows))
        assert np.isfinite(result.to_floats()).all()


@pytest.mark.parametrize("dtype", ["uint4", "int4"])
def test_scales_and_offsets_stay_exact_in_bfloat16(dtype):
    rows, weight = _inputs(3, 64, 2), _weight(3, 16, 64, 2)
    scheme = "asymmetric" if dtype == "uint4" else "symmetric"
    for corrections in (*CORRECTIONS, "hqq"):
        spec = QuantSpec.parse(f"{dtype} {scheme} per_group 32 {corrections}")
        result = corrected_weight(weight, spec, _moments(rows))
        assert (to_bfloat16(result.scales) == result.scales).all()
        assert (to_bfloat16(result.offsets) == result.offsets).all()
        assert result.codes.max() <= 15


def test_hqq_needs_no_data_and_moves_offsets_so_that_small_errors_get_smaller():
    random = np.random.default_rng(0)
    weight = random.standard_t(3, size=(32, 64)).astype(np.float32)
    spec = _spec("hqq")
    result, nearest = corrected_weight(weight, spec), round_to_nearest(weight, spec)
    assert (result.scales == nearest.scales).all()
    norms = [(np.abs(r.to_floats() - weight) ** 0.7).sum() for r in (result, nearest)]
    assert norms[0] < norms[1]
