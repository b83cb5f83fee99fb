"""The rule by which seconds of rounds decide among runtimes: before a search, and after it."""

import numpy as np
import pytest

from neural_mp.tuning.measurement.other_runtimes import is_certain, select_runtime

ROUNDS = 30
#: Fast in a few rounds, slower than the others in the rest: the first decile is 0.3.
UNSTEADY = [0.3] * 5 + [2.0] * 25


def steady(seconds: float) -> list[float]:
    """Rounds with 1 % of noise."""
    noise = np.random.default_rng(round(1000 * seconds)).normal(1, 0.01, ROUNDS)
    return list(seconds * noise)


def test_the_fastest_runtime_that_gains_enough_is_selected():
    assert select_runtime([steady(1.0), steady(0.8), steady(0.5)]) == 2
    assert select_runtime([steady(0.5), steady(0.8), steady(1.0)], source=2) == 0


@pytest.mark.parametrize("seconds", [0.98, 1.0, 1.2])
def test_the_source_is_kept_where_no_runtime_gains_enough(seconds):
    assert select_runtime([steady(1.0), steady(seconds)]) == 0


def test_the_next_runtime_is_selected_where_the_fastest_is_uncertain():
    assert select_runtime([steady(1.0), UNSTEADY, steady(0.5)]) == 2
    assert select_runtime([steady(1.0), UNSTEADY]) == 0


def test_without_the_source_the_fastest_is_selected():
    assert select_runtime([steady(1.0), steady(0.98)], source=None) == 1


def test_a_current_runtime_is_left_only_for_a_faster_one():
    rounds = [steady(1.0), steady(0.5), steady(0.501)]
    fastest = select_runtime(rounds)
    assert fastest != 0
    assert select_runtime(rounds, current=3 - fastest) == 3 - fastest
    assert select_runtime([steady(1.0), steady(0.5), steady(0.6)], current=2) == 1
    assert select_runtime([steady(1.0), UNSTEADY, steady(0.5), steady(0.6)], current=3) == 2


def test_a_current_runtime_that_gains_too_little_over_the_source_is_left():
    assert select_runtime([steady(1.0), steady(0.99)], current=1) == 0
    assert select_runtime([steady(1.0), steady(0.99), steady(0.5)], current=1) == 2


@pytest.mark.parametrize("options", [{}, {"source": None}, {"source": 1}, {"current": 0}])
def test_one_runtime_or_two_equal_ones_are_a_choice(options):
    assert select_runtime([steady(1.0), [1.0] * ROUNDS], **options) in (0, 1)
    single = {name: None if value is None else 0 for name, value in options.items()}
    assert select_runtime([steady(1.0)], **single) == 0
    assert is_certain([steady(1.0)], **single)


def test_rounds_are_added_until_the_gain_over_the_source_is_certain():
    assert not is_certain([steady(1.0), UNSTEADY])
    assert is_certain([steady(1.0), steady(0.5)])
    assert is_certain([steady(1.0), steady(1.5)])


def test_rounds_are_added_until_the_gain_over_the_current_runtime_is_certain():
    assert not is_certain([steady(9.0), UNSTEADY, steady(1.0)], current=2)
    assert is_certain([steady(9.0), steady(0.5), steady(1.0)], current=2)
    assert is_certain([steady(9.0), steady(1.5), steady(1.0)], current=2)
