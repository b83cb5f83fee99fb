"""Calibration ranges of tensors at the extremes of float32."""

import warnings

import numpy as np
from hypothesis import example, given, settings
from hypothesis import strategies as st

from neural_mp.adaptors.common.calibration import Observer, summarize_observations, summarized
from neural_mp.adaptors.common.quant_params import compute_affine_parameters
from neural_mp.core.observations import Observations
from neural_mp.core.quant_spec import RANGE_ALGORITHMS

LARGEST = float(np.finfo(np.float32).max)
SMALLEST = float(np.finfo(np.float32).smallest_subnormal)
SHAPES = ("normal", "one value", "constant", "outlier", "zeros but one", "two values")


def observer_of(values: np.ndarray) -> Observer:
    """Statistics of values in one batch."""
    observer = Observer()
    summary = summarized(values)
    assert summary is not None
    observer.update(summary)
    return observer


def values_of(shape: str, magnitude: float, sign: float, seed: int) -> np.ndarray:
    """Values of a distribution whose largest magnitude is given, [samples, channels]."""
    random = np.random.default_rng(seed)
    values = {
        "normal": lambda: np.clip(random.normal(size=(512, 4)) / 4, -1, 1),
        "one value": lambda: np.ones((1, 1)),
        "constant": lambda: np.ones((64, 4)),
        "outlier": lambda: np.concatenate([random.normal(size=(511, 4)) / 1e4, np.ones((1, 4))]),
        "zeros but one": lambda: np.eye(1, 65536).reshape(-1, 4),
        "two values": lambda: np.array([[1.0, -1.0]]),
    }[shape]()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # underflow of the smallest magnitudes
        return (values * sign * magnitude).astype(np.float32)


@settings(max_examples=60, deadline=None)
@given(
    st.sampled_from(SHAPES),
    st.floats(np.log10(SMALLEST), np.log10(LARGEST)).map(lambda power: 10**power),
    st.sampled_from((1.0, -1.0)),
    st.integers(0, 99),
)
@example("normal", SMALLEST, 1.0, 0)
@example("normal", LARGEST, 1.0, 0)
@example("two values", LARGEST, 1.0, 0)
@example("two values", 1e-29, -1.0, 0)
@example("outlier", 1e-38, 1.0, 0)
@example("zeros but one", 1e38, 1.0, 0)
def test_every_algorithm_chooses_a_finite_range_at_every_magnitude(shape, magnitude, sign, seed):
    values = values_of(shape, min(magnitude, LARGEST), sign, seed)
    observer = observer_of(values)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranges = observer.choose_ranges()
        noises = observer.noise, observer.channel_noise
    full = min(float(values.min()), 0.0), max(float(values.max()), 0.0)
    assert ranges["minmax"] == full
    assert set(ranges) == set(RANGE_ALGORITHMS)
    for low, high in ranges.values():
        assert full[0] <= low <= 0 <= high <= full[1]
        scale, zero = compute_affine_parameters(low, high)
        assert 0 < np.float32(scale) < np.inf
        assert 0 <= zero <= 255
    assert all(0 <= noise <= 1 for noise in noises)


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(("normal", "outlier")), st.integers(-60, 90), st.integers(0, 99))
def test_ranges_scale_with_the_values(shape, exponent, seed):
    """The reference is the range of the same values near 1; powers of two are exact."""
    values = values_of(shape, 1.0, 1.0, seed)
    near_one = observer_of(values).choose_ranges()
    scaled = observer_of(np.ldexp(values, exponent)).choose_ranges()
    for name, (low, high) in near_one.items():
        assert scaled[name] == (float(np.ldexp(low, exponent)), float(np.ldexp(high, exponent)))


@given(st.lists(st.sampled_from((1.0, np.nan, np.inf, -np.inf)), min_size=1, max_size=6))
def test_nan_and_inf_are_noted_with_the_first_batch_wherever_they_are(batches):
    observer = Observer()
    for number, value in enumerate(batches, 1):
        summary = summarized(np.array([[1.0, 2.0], [value, 0.5]], np.float32))
        assert summary is not None
        observer.update(summary, number)
    observations = summarize_observations({"relu": observer}, len(batches))
    numbers = [number for number, value in enumerate(batches, 1) if not np.isfinite(value)]
    if not numbers:
        assert observations.ranges["relu"]["minmax"] == (0.0, 2.0)
        assert not observations.non_finite
        assert not observations.notes
        return
    assert "relu" not in observations.ranges
    entry = observations.non_finite["relu"]
    assert entry.batch == numbers[0]
    assert entry.value == ("NaN" if np.isnan(batches[numbers[0] - 1]) else "Inf")
    assert f"1 tensor ('relu') held {entry.value} in batch {numbers[0]}" in observations.notes[0]
    assert Observations.from_dict(observations.to_dict()) == observations
