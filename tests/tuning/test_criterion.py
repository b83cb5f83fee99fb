import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
from neural_mp.errors import ConfigurationError


@pytest.mark.parametrize(
    ("criterion", "baseline", "just_met", "just_missed"),
    [
        (AccuracyCriterion(0.01), 0.9, 0.891, 0.8909),
        (AccuracyCriterion(0.01, relative=False), 0.9, 0.89, 0.8899),
        (AccuracyCriterion(0.1, higher_is_better=False), 2.0, 2.2, 2.2001),
        (AccuracyCriterion(0.1, relative=False, higher_is_better=False), 2.0, 2.1, 2.1001),
        # A negative metric, such as a log-likelihood: one percent of its size.
        (AccuracyCriterion(0.01), -100.0, -101.0, -101.01),
        # A share of nothing does not exist: an amount.
        (AccuracyCriterion(0.01), 0.0, -0.01, -0.0101),
        (AccuracyCriterion(0.0), 0.9, 0.9, 0.8999),
    ],
)
def test_the_target_is_where_it_is_said_to_be(criterion, baseline, just_met, just_missed):
    assert criterion.met(baseline, just_met)
    assert not criterion.met(baseline, just_missed)
    assert criterion.target(baseline) == pytest.approx(just_met)


directions = st.sampled_from([True, False, None])
criteria = st.one_of(
    st.builds(AccuracyCriterion, st.floats(0, 0.499), st.just(True), directions),
    st.builds(AccuracyCriterion, st.floats(0, 1e3), st.just(False), directions),
)


@given(st.floats(-1e3, 1e3), criteria)
def test_what_is_as_good_as_fp32_is_always_met(baseline, criterion):
    assert criterion.met(baseline, baseline)


@given(st.floats(-1e3, 1e3), criteria)
def test_nan_is_never_met(baseline, criterion):
    assert not criterion.met(baseline, math.nan)


@given(st.floats(-1e3, 1e3), st.floats(-1e3, 1e3), st.floats(0, 0.499), st.booleans())
def test_where_nobody_says_the_larger_value_is_better(baseline, accuracy, tolerance, relative):
    unsaid = AccuracyCriterion(tolerance, relative)
    higher = AccuracyCriterion(tolerance, relative, higher_is_better=True)
    assert unsaid.higher_is_better is None
    assert unsaid.met(baseline, accuracy) is higher.met(baseline, accuracy)
    assert unsaid.loss(baseline, accuracy) == higher.loss(baseline, accuracy)
    assert unsaid.target(baseline) == higher.target(baseline)
    assert str(unsaid) == str(higher)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf, "0.01"])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(ConfigurationError, match="tolerance"):
        AccuracyCriterion(tolerance)


@pytest.mark.parametrize(
    ("tolerance", "words"),
    [
        (1, r"below 0\.5, got 1 \(100 % of the baseline.*did you mean 0\.01 \(1 %\)\?"),
        (2.5, r"250 % of the baseline.*did you mean 0\.025 \(2\.5 %\)\?"),
        (0.5, r"50 % of the baseline.*did you mean 0\.005 \(0\.5 %\)\?"),
    ],
)
def test_a_percentage_written_as_a_share_is_refused(tolerance, words):
    with pytest.raises(ConfigurationError, match=words):
        AccuracyCriterion(tolerance)
    assert AccuracyCriterion(tolerance, relative=False).tolerance == tolerance


@pytest.mark.parametrize("direction", ["false", 0, 1.0])
def test_a_direction_that_is_none_is_refused(direction):
    with pytest.raises(ConfigurationError, match="higher_is_better must be true or false"):
        AccuracyCriterion(higher_is_better=direction)


@pytest.mark.parametrize("limits", [{"timeout": -1}, {"max_trials": 0}])
def test_limits_out_of_range_are_refused(limits):
    (name,) = limits
    with pytest.raises(ConfigurationError, match=name):
        ExitPolicy(**limits)
