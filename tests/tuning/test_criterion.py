import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from neural_mp.errors import ConfigurationError
from neural_mp.tuning.criterion import AccuracyCriterion, ExitPolicy


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


@given(st.floats(-1e3, 1e3), st.floats(0, 1), st.booleans(), st.booleans())
def test_what_is_as_good_as_fp32_is_always_met(baseline, tolerance, relative, higher):
    assert AccuracyCriterion(tolerance, relative, higher).met(baseline, baseline)


@given(st.floats(-1e3, 1e3), st.floats(0, 1), st.booleans(), st.booleans())
def test_nan_is_never_met(baseline, tolerance, relative, higher):
    assert not AccuracyCriterion(tolerance, relative, higher).met(baseline, math.nan)


@pytest.mark.parametrize("tolerance", [-0.1, math.nan, math.inf, "0.01"])
def test_a_tolerance_that_is_none_is_refused(tolerance):
    with pytest.raises(ConfigurationError, match="tolerance"):
        AccuracyCriterion(tolerance)


@pytest.mark.parametrize("limits", [{"timeout": -1}, {"max_trials": 0}])
def test_limits_out_of_range_are_refused(limits):
    (name,) = limits
    with pytest.raises(ConfigurationError, match=name):
        ExitPolicy(**limits)
