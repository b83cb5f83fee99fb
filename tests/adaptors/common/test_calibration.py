"""Ranges and scores from statistics, against what numpy computes from all values at once."""

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import rel_entr

from neural_mp.adaptors.common.calibration import (
    SAMPLE_LIMIT,
    Observer,
    compute_affine_parameters,
    summarize_observations,
    summarized,
)


def observed(*batches: np.ndarray) -> Observer:
    """Statistics of batches shaped [samples, channels]."""
    statistics = Observer()
    for batch in batches:
        summary = summarized(batch)
        assert summary is not None
        statistics.update(summary)
    return statistics


def quantized(values: np.ndarray, low: float, high: float) -> np.ndarray:
    scale, zero = compute_affine_parameters(low, high)
    return (np.clip(np.round(values / scale) + zero, 0, 255) - zero) * scale


@given(st.floats(-1e6, 1e6), st.floats(-1e6, 1e6))
def test_zero_is_always_exact_and_the_range_is_covered(a, b):
    low, high = min(a, b), max(a, b)
    scale, zero = compute_affine_parameters(low, high)
    assert 0 <= zero <= 255
    assert scale > 0
    assert quantized(np.zeros(1), low, high) == 0
    for bound in (min(low, 0), max(high, 0)):
        assert abs(quantized(np.array([bound]), low, high)[0] - bound) <= scale


@settings(max_examples=30)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_extremes_and_channel_powers_are_those_of_all_batches_together(seed, count):
    random = np.random.default_rng(seed)
    batches = [random.normal(size=(random.integers(1, 20), 5)) for _ in range(count)]
    statistics = observed(*batches)
    together = np.concatenate(batches)
    assert (statistics.low, statistics.high) == (together.min(), together.max())
    np.testing.assert_allclose(statistics._power, np.square(together).mean(0))
    assert statistics.choose_ranges()["minmax"] == (min(together.min(), 0), max(together.max(), 0))


def test_memory_is_bounded_whatever_the_number_of_batches():
    random = np.random.default_rng(0)
    statistics = observed(*(random.normal(size=(512, 8)) for _ in range(200)))
    assert len(statistics._sampled_values) <= SAMPLE_LIMIT + 4096
    assert abs(statistics._sampled_values.std() - 1) < 0.05


def test_clipping_beats_the_full_range_where_one_value_is_far_out():
    random = np.random.default_rng(0)
    values = random.normal(size=(28000, 1))
    values[0] = 100.0
    ranges = observed(*np.split(values, 7)).choose_ranges()
    errors = {
        name: np.square(quantized(values[1:], *bounds) - values[1:]).mean()
        for name, bounds in ranges.items()
    }
    for name in ("percentile", "kl"):
        assert errors[name] < errors["minmax"] / 10, (name, ranges)
    # The squared error weighs the outlier itself, so it clips less, but never does worse overall.
    total = {n: np.square(quantized(values, *b) - values).mean() for n, b in ranges.items()}
    assert total["mse"] <= total["minmax"]


def test_well_behaved_values_are_hardly_clipped():
    values = np.random.default_rng(0).uniform(0, 1, size=(4000, 1))
    for name, (low, high) in observed(values).choose_ranges().items():
        assert low == 0, name
        assert high > 0.9, name


def test_many_exact_zeros_do_not_mislead_kl():
    values = np.maximum(np.random.default_rng(0).normal(size=(4000, 1)), 0)
    low, high = observed(values).choose_ranges()["kl"]
    assert low == 0
    assert high > 0.5 * values.max()


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["normal", "laplace", "exponential", "gumbel"]))
def test_the_clipping_by_kl_is_the_one_of_least_relative_entropy(seed, distribution):
    """Every clipping in steps of 1 %, its histograms made value by value, through SciPy."""
    values = getattr(np.random.default_rng(seed), distribution)(
        size=(4096, 1)
    )  # of so many, all are looked at
    statistics = observed(values)
    low, high = statistics.choose_ranges()["minmax"]
    counts, edges = np.histogram(values[values != 0], bins=2048, range=(low, high))
    bins = np.repeat((edges[:-1] + edges[1:]) / 2, counts)

    def divergence(share: float) -> float:
        limit = share * max(-low, high)
        indices = np.flatnonzero(np.abs((edges[:-1] + edges[1:]) / 2) <= limit)
        if len(indices) < 256:
            return np.inf
        inside = np.searchsorted(edges, np.clip(bins, *edges[indices[[0, -1]]] + 1e-9), "right") - 1
        reference = np.bincount(inside, minlength=2048)[indices].astype(float)
        level, filled = np.arange(len(indices)) * 256 // len(indices), counts[indices] > 0
        values_in, filled_in = (
            np.bincount(level, weights) for weights in (counts[indices], filled)
        )
        coarse = np.where(filled, (values_in / np.maximum(filled_in, 1))[level], 0)
        filled_up = np.maximum(coarse, 1e-12 * coarse.sum())
        return float(rel_entr(reference / reference.sum(), filled_up / filled_up.sum()).sum())

    chosen = statistics.choose_ranges()["kl"]
    share = max(-chosen[0], chosen[1]) / max(-low, high)
    least = min(divergence(tried) for tried in np.linspace(1.0, 0.05, 96))
    assert divergence(share + 1e-9) == pytest.approx(least, rel=1e-6)


def test_the_noise_with_a_scale_per_channel_is_that_of_each_channel_alone():
    random = np.random.default_rng(0)
    values = random.normal(size=(512, 6)).astype(np.float32) * np.array([1, 80, 0, 1e-3, 5, 1])
    values[:, 4] += 40  # never 0, which the range includes
    noises = [observed(values[:, channel : channel + 1]).noise for channel in range(6)]
    assert observed(values).channel_noise == pytest.approx(np.mean(noises))
    assert observed(values).noise > 100 * max(noises)


def test_one_channel_that_drowns_the_others_is_seen():
    random = np.random.default_rng(0)
    even = random.normal(size=(1000, 16))
    drowned = even.copy()
    drowned[:, 3] *= 1024
    assert observed(even).noise < 1e-3
    assert observed(drowned).noise > 0.9


def test_the_noise_score_is_the_noise_that_quantizing_makes():
    random = np.random.default_rng(0)
    values = random.normal(size=(5000, 8)) * np.array([1, 1, 1, 1, 0.3, 0.3, 3, 3])
    statistics = observed(values)
    error = quantized(values, statistics.low, statistics.high) - values
    true = (np.square(error).mean(0) / np.square(values).mean(0)).mean()
    assert statistics.noise == pytest.approx(true, rel=0.15)


def test_a_tensor_of_zeros_has_a_range_and_no_noise():
    statistics = observed(np.zeros((10, 2)))
    assert statistics.noise == 0
    assert set(statistics.choose_ranges().values()) == {(0.0, 0.0)}


def test_the_channels_of_the_noisiest_tensors_are_kept_and_of_no_more_than_32():
    """What may be worth a repair; a file of observations must not grow with the model."""
    random = np.random.default_rng(0)
    statistics = {}
    for index in range(40):
        values = random.normal(size=(256, 8)) * np.array([1.0 + 10 * index, *[1.0] * 7])
        statistics[f"t{index:02}"] = observed(values)
    observations = summarize_observations(statistics, 256)
    noisiest = sorted(observations.nsr, key=observations.nsr.__getitem__)[-32:]
    assert set(observations.channels) == set(noisiest)
    assert "t00" not in observations.channels  # nothing drowns there


@pytest.mark.parametrize(
    ("shape", "axis"),
    [
        ((), -1),
        ((5,), -1),
        ((4, 6), -1),
        ((2, 3, 4, 5), 1),
        ((2, 3, 4, 5), -1),
        ((3, 41, 41, 3), -1),
        ((1, 24, 61, 61), 1),
        ((7, 5000), -1),
    ],
)
def test_what_is_taken_of_a_tensor_is_what_numpy_says_of_each_channel(shape, axis):
    values = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    summary = summarized(values, axis)
    channels = (
        np.moveaxis(values, axis, 0).reshape(values.shape[axis], -1)
        if len(shape) > 1
        else values.reshape(1, -1)
    )
    np.testing.assert_allclose(summary.low, channels.min(1))
    np.testing.assert_allclose(summary.high, channels.max(1))
    np.testing.assert_allclose(summary.mean, channels.mean(1), atol=1e-6)
    np.testing.assert_allclose(summary.power, np.square(channels).mean(1), rtol=1e-5)
    assert summary.count == channels.shape[1]
    assert set(np.unique(summary.sample)) <= set(np.unique(values))
    assert summarized(np.zeros((0, 3), np.float32)) is None


def test_images_with_channels_last_in_memory_are_summarized_where_they_lie():
    stored = np.random.default_rng(0).standard_normal((4, 64, 64, 32), np.float32)
    image = np.moveaxis(stored, -1, 1)
    tracemalloc.start()
    try:
        summary = summarized(image, 1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < image.nbytes / 4
    expected = summarized(np.ascontiguousarray(image), 1)
    assert summary is not None
    assert expected is not None
    np.testing.assert_array_equal(summary.sample, expected.sample)
    np.testing.assert_array_equal(summary.low, expected.low)
    np.testing.assert_array_equal(summary.high, expected.high)
    np.testing.assert_allclose(summary.mean, expected.mean, atol=1e-5)
    np.testing.assert_allclose(summary.power, expected.power, rtol=1e-5)
    assert summary.count == expected.count
