"""Scores on one scale, and which repairs are worth it."""

import pytest

from neural_mp.core.observations import Observations
from neural_mp.search.corrections import (
    apply_correction_nsr,
    choose_best_corrections,
    rescale_noise_estimates,
)

SEEN = Observations(
    nsr={"a": 0.9, "b": 0.4, "c": 0.2},
    corrected_nsr={
        "a": {"equalize": 0.03, "smooth": 0.01},
        "b": {"equalize": 0.3},
        "c": {"smooth": 0.05},
    },
)


def test_the_repair_that_leaves_least_noise_is_taken_if_it_takes_half_or_more_away():
    assert choose_best_corrections(SEEN) == {"a": "smooth", "c": "smooth"}


def test_noise_is_that_of_the_repaired_tensors():
    assert apply_correction_nsr(SEEN, {"a": "smooth"}) == {"a": 0.01, "b": 0.4, "c": 0.2}


def test_what_was_not_measured_arrives_like_the_middle_of_what_was():
    noise = {"a": 0.1, "b": 0.2, "c": 0.4, "d": 0.3}
    exact = {"a": 0.01, "b": 0.04, "c": 0.04}  # shares 0.1, 0.2, 0.1
    assert rescale_noise_estimates(noise, exact) == pytest.approx({**exact, "d": 0.03})


def test_without_measurements_estimates_stay_as_they_are():
    assert rescale_noise_estimates({"a": 0.1}, {}) == {"a": 0.1}
