"""The rule by which a loss scale rises and falls."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.core.training_numerics import LossScale, LossScaleState
from neural_mp.errors import ConfigurationError


def after(rule, *finite):
    state = rule.start()
    for is_finite in finite:
        state = rule.after(state, is_finite)
    return state


def test_a_step_that_is_not_finite_halves_the_scale_and_is_not_counted():
    assert after(LossScale(), True, False) == LossScaleState(2**14, 0, 1, 1, 1)


def test_the_scale_doubles_after_the_interval_and_counts_anew():
    rule = LossScale(growth_interval=3)
    assert after(rule, *[True] * 2).scale == 2**15
    assert after(rule, *[True] * 3).scale == 2**16
    assert after(rule, *[True] * 5).scale == 2**16
    assert after(rule, *[True] * 6).scale == 2**17


def test_a_bad_step_begins_the_interval_anew():
    assert after(LossScale(growth_interval=3), True, True, False, True, True).scale == 2**14


@given(st.lists(st.booleans(), max_size=400))
def test_the_scale_stays_within_its_bounds_and_every_step_is_counted(finite):
    rule = LossScale(growth_interval=2)
    state = after(rule, *finite)
    assert rule.minimum <= state.scale <= rule.maximum
    assert math.log2(state.scale).is_integer()
    assert (state.steps, state.skipped_steps) == (finite.count(True), finite.count(False))


def test_a_fixed_scale_stays():
    rule = LossScale.fixed(1024)
    assert after(rule, True, False, False).scale == 1024
    assert after(rule, True, False, False).skipped_in_a_row == 2
    assert LossScale.read(1024) == rule


@pytest.mark.parametrize(
    "options",
    [
        {"initial": 0},
        {"initial": math.inf},
        {"initial": "large"},
        {"initial": True},
        {"initial": 2.0**30},
        {"factor": 1},
        {"growth_interval": 0},
        {"growth_interval": 1.5},
        {"minimum": -1.0},
        {"minimum": 4.0, "maximum": 2.0},
    ],
)
def test_numbers_out_of_bounds_are_named(options):
    with pytest.raises(ConfigurationError, match=f"loss scale: .*{next(iter(options))}"):
        LossScale(**options)


@pytest.mark.parametrize("given", ["static", None, True, [1024]])
def test_what_is_no_loss_scale_is_refused(given):
    with pytest.raises(ConfigurationError, match="'dynamic', a number or a LossScale"):
        LossScale.read(given)
