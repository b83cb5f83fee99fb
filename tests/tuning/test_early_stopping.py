"""When an evaluation is stopped because it is lost: hand-worked cases and seeded simulations."""

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.tuning.evaluation.early_stopping import (
    RunningValues,
    looks_shuffled,
    will_miss_target,
)

ABSOLUTE = AccuracyCriterion(0.01, relative=False)
#: Batches of ten that score 0.9 and 0.7 in turn: a mean of 0.8.
BASELINE = (0.9, 0.7) * 5


def passed(scores, size=10):
    """The running values of batches that score so, the means of `size` samples each."""
    ends = np.cumsum(np.broadcast_to(size, len(scores)))
    sums = np.cumsum(np.asarray(scores) * size)
    return RunningValues(tuple((sums / ends).tolist()), tuple(ends.tolist()))


def until(whole, batches):
    return RunningValues(whole.values[:batches], whole.samples[:batches])


def stopped_after(baseline, candidate, criterion, **options):
    for count in range(1, len(baseline.values) + 1):
        if will_miss_target(baseline, until(candidate, count), criterion, **options):
            return count
    return None


# --- out of reach --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("first", "lost"),
    [
        ((0.0,), False),  # all right from here on: 0.9, where 0.79 is asked for
        ((0.0, 0.0), False),
        ((0.0, 0.0, 0.9), False),  # 0.79 exactly
        ((0.0, 0.0, 0.8), True),
    ],
)
def test_lost_if_a_perfect_rest_would_still_miss(first, lost):
    assert will_miss_target(passed(BASELINE), passed(first), ABSOLUTE, best=1.0) is lost


@pytest.mark.parametrize(("first", "lost"), [(21.0, False), (21.1, True)])
def test_a_lowest_value_is_out_of_reach_in_the_same_way(first, lost):
    criterion = AccuracyCriterion(0.1, relative=False, higher_is_better=False)
    # Ten batches at 2.0 and nothing but zeros from here on: 2.1 is met, 2.11 is not.
    assert will_miss_target(passed([2.0] * 10), passed([first]), criterion, best=0.0) is lost


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_out_of_reach_never_errs_whatever_the_order(data):
    counts = st.lists(st.integers(0, 10), min_size=6, max_size=6)
    baseline, candidate = (passed(np.array(data.draw(counts)) / 10) for _ in range(2))
    criterion = AccuracyCriterion(data.draw(st.floats(0, 0.2)), data.draw(st.booleans()))
    # The smallest rate takes the odds out of the game.
    stop = stopped_after(baseline, candidate, criterion, rate=1e-300, best=1.0)
    assert stop is None or not criterion.met(baseline.values[-1], candidate.values[-1])


# --- against all odds ----------------------------------------------------------------------------


def test_the_bet_worked_by_hand():
    baseline = passed(BASELINE)
    candidate = passed(np.array(BASELINE[:5]) - 0.5)
    # Four batches are watched. Of the 1.0 that may be lost over 100 samples 20 are lost on 40: the
    # other 60 would have to win 19/60 each. The baseline's batches differ by 0.2; a quarter of it
    # is at risk, 0.05, so the bet is 0.75/0.05 = 15. The fifth batch loses 0.5 again: the wealth is
    # 1 + 15 · (0.5 + 19/60) = 13.25.
    assert will_miss_target(baseline, candidate, ABSOLUTE, rate=1 / 13.2)
    assert not will_miss_target(baseline, candidate, ABSOLUTE, rate=1 / 13.3)


def test_nothing_is_bet_on_the_first_batches():
    baseline = passed(BASELINE)
    for count in range(1, 5):
        assert not will_miss_target(baseline, passed([-100.0] * count), ABSOLUTE, rate=0.999)


def test_nor_on_few_samples():
    baseline, harm = passed((0.9, 0.7) * 20, 2), -100.0
    assert not will_miss_target(baseline, passed([harm, harm - 1] * 7, 2), ABSOLUTE)
    assert will_miss_target(baseline, passed([harm, harm - 1] * 7 + [harm], 2), ABSOLUTE)


def test_one_bad_batch_after_none_that_differs_is_little_evidence():
    scores = np.array((0.9, 0.7) * 20)
    harmed = scores.copy()
    harmed[12] -= 0.5  # five of 400 samples: beyond the tolerance of four
    assert not will_miss_target(passed(scores), passed(harmed[:13]), ABSOLUTE)


def test_what_would_be_accepted_without_a_further_difference_goes_on():
    scores = np.array((0.9, 0.7) * 50)
    assert not will_miss_target(passed(scores), passed(scores[:8] - 0.12), ABSOLUTE, rate=0.999)
    assert will_miss_target(passed(scores), passed(scores[:9] - 0.12), ABSOLUTE, rate=0.999)


def test_a_broken_model_is_seen_soon():
    draw = np.random.default_rng(0)
    baseline, broken = (passed(draw.binomial(32, share, 100) / 32, 32) for share in (0.76, 0.1))
    assert 5 <= stopped_after(baseline, broken, ABSOLUTE) <= 12


def test_a_baseline_without_any_spread():
    perfect = passed([1.0] * 50)
    assert stopped_after(perfect, perfect, ABSOLUTE) is None
    assert stopped_after(perfect, perfect, AccuracyCriterion(0.0)) is None
    assert stopped_after(perfect, passed([0.5, 0.6] * 25), ABSOLUTE) <= 20


def test_short_last_batch_and_empty_batches():
    draw = np.random.default_rng(1)
    sizes = np.array([32] * 60 + [1])
    baseline, broken = (passed(draw.binomial(sizes, p) / sizes, sizes) for p in (0.9, 0.1))
    assert stopped_after(baseline, broken, ABSOLUTE) <= 12
    with_empty = [
        RunningValues(
            (math.nan, *part.values[:3], part.values[2], *part.values[3:]),
            (0, *part.samples[:3], part.samples[2], *part.samples[3:]),
        )
        for part in (baseline, broken)
    ]
    assert stopped_after(*with_empty, ABSOLUTE) == stopped_after(baseline, broken, ABSOLUTE) + 2


@given(st.integers(0, 1000), st.sampled_from([1e-3, 7.0, 100.0]))
@settings(max_examples=15, deadline=None)
def test_neither_units_nor_direction_matter(seed, factor):
    draw = np.random.default_rng(seed)
    baseline = draw.binomial(20, 0.8, 40) / 20
    candidate = baseline - draw.binomial(20, 0.1, 40) / 20
    expected = stopped_after(passed(baseline), passed(candidate), AccuracyCriterion(0.02))
    lower = AccuracyCriterion(0.02, higher_is_better=False)
    for sign, criterion in ((1, AccuracyCriterion(0.02)), (-1, lower)):
        pair = (passed(baseline * sign * factor), passed(candidate * sign * factor))
        assert stopped_after(*pair, criterion) == expected


def test_a_share_of_a_baseline_of_zero_is_an_amount():
    scores = np.array((0.1, -0.1) * 20)
    relative, absolute = (AccuracyCriterion(0.02, relative) for relative in (True, False))
    pair = (passed(scores), passed(scores - 0.5))
    assert stopped_after(*pair, relative) == stopped_after(*pair, absolute) < 15


# --- what cannot be compared ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "candidate",
    [
        RunningValues(),
        passed([0.0] * 10),  # all of the data: the criterion decides
        passed([0.0] * 11),
        passed([0.0] * 6, 11),  # other data
        RunningValues((0.0, 0.0, math.nan), (10, 20, 30)),
        RunningValues((0.0, 0.0, -math.inf), (10, 20, 30)),
    ],
)
def test_what_cannot_be_judged_is_not_lost(candidate):
    assert not will_miss_target(passed(BASELINE), candidate, ABSOLUTE, rate=0.9, best=1.0)


def test_a_baseline_that_ends_undefined_judges_nobody():
    whole = passed(BASELINE)
    for broken in (RunningValues((*whole.values[:-1], math.nan), whole.samples), RunningValues()):
        assert not will_miss_target(broken, passed([0.0] * 6), ABSOLUTE, rate=0.9, best=1.0)


def test_values_that_come_late_count_with_the_next():
    scores = np.random.default_rng(2).binomial(10, 0.8, 60) / 10
    baseline, candidate = passed(scores), passed(scores - 0.5)
    late = RunningValues((math.nan, math.inf, *candidate.values[2:]), candidate.samples)
    assert stopped_after(baseline, candidate, ABSOLUTE) < 15
    assert stopped_after(baseline, late, ABSOLUTE) < 17


@pytest.mark.parametrize("rate", [0.0, 1.0, -1.0, math.nan])
def test_a_rate_that_is_none_is_refused(rate):
    with pytest.raises(ValueError, match="rate"):
        will_miss_target(passed(BASELINE), passed([0.1]), ABSOLUTE, rate)


# --- order ---------------------------------------------------------------------------------------


def test_random_order_is_believed_and_sorted_data_are_not():
    draw = np.random.default_rng(0)
    believed = np.mean([looks_shuffled(draw.binomial(32, 0.8, 60) / 32) for _ in range(1000)])
    assert 0.93 <= believed <= 0.98
    by_class = np.repeat([0.95, 0.8, 0.9, 0.7, 0.85, 0.6], 10)
    verdicts = [looks_shuffled(draw.binomial(32, by_class) / 32) for _ in range(200)]
    assert np.mean(verdicts) < 0.01
    assert not looks_shuffled(np.arange(20.0))
    for values in ([1.0] * 20, [0.1, 0.9], []):
        assert looks_shuffled(values)


def test_data_sorted_by_class_are_left_to_the_end():
    by_class = np.repeat([0.95, 0.8, 0.9, 0.7, 0.85, 0.6], 20)
    scores = np.random.default_rng(0).binomial(32, by_class) / 32
    harm = np.repeat([0.4, -0.08, -0.08, -0.08, -0.08, -0.08], 20)  # nothing on the whole
    sorted_by_class = passed(scores, 32), passed(scores - harm, 32)
    assert stopped_after(*sorted_by_class, ABSOLUTE) is None
    # The odds alone would stop it: where the baseline scores the same in another order.
    mixed = np.random.default_rng(0).permutation(scores)
    assert stopped_after(passed(mixed, 32), passed(mixed - harm, 32), ABSOLUTE) <= 20


def test_harm_that_fades_is_waited_for():
    draw = np.random.default_rng(1)
    scores = draw.binomial(32, 0.8, 100) / 32
    harm = 0.15 + 0.05 * draw.standard_normal(100)
    fading = harm - np.linspace(0, 0.3, 100)
    steady, fades = (
        stopped_after(passed(scores), passed(scores - h), ABSOLUTE) for h in (harm, fading)
    )
    assert steady <= 30
    assert fades is None


# --- kept ----------------------------------------------------------------------------------------


def test_running_values_grow_and_are_kept_as_json():
    grown = RunningValues().with_batch(math.nan, 4).with_batch(0.5, 4).with_batch(0.6, 2)
    assert grown.samples == (4, 8, 10)
    text = json.dumps(grown.to_dict(), allow_nan=False)
    again = RunningValues.from_dict(json.loads(text))
    assert math.isnan(again.values[0])
    assert (again.values[1:], again.samples) == ((0.5, 0.6), (4, 8, 10))


def test_a_value_without_its_samples_is_refused():
    with pytest.raises(ValueError, match=r"one item per value \(2\), got 1"):
        RunningValues((0.1, 0.2), (1,))


# --- simulated -----------------------------------------------------------------------------------


def flipped(draw, batches, size, gained, lost):
    """Wrong answers of a baseline and of a model that gains some and loses some, shuffled."""
    count = batches * size
    baseline = np.zeros(count)
    baseline[: count // 4] = 1
    candidate = baseline.copy()
    candidate[:gained], candidate[count // 4 : count // 4 + lost] = 0, 1
    order = draw.permutation(count)
    return [
        passed(part[order].reshape(batches, size).mean(1), size) for part in (baseline, candidate)
    ]


def tailed(draw, batches, size, share):
    """Errors with a heavy tail, of which the largest are mended and all others grow."""
    baseline = draw.lognormal(0, 2, batches * size)
    candidate = baseline.copy()
    worst = np.argsort(baseline)[-len(baseline) // 200 :]
    candidate[worst] = 0
    rest = np.delete(np.arange(len(baseline)), worst)
    candidate[rest] += (baseline.sum() * (1 + share) - candidate.sum()) / len(rest)
    return [passed(part.reshape(batches, size).mean(1), size) for part in (baseline, candidate)]


@pytest.mark.parametrize("tolerance", [0.0, 0.02])
@pytest.mark.parametrize(("batches", "size"), [(10, 20), (40, 10)])
def test_who_just_meets_the_target_is_hardly_ever_stopped(batches, size, tolerance):
    draw, count, rate = np.random.default_rng(0), 100, 0.02
    criterion = AccuracyCriterion(tolerance, False, False)
    share = AccuracyCriterion(tolerance, True, False)
    allowed = math.floor(tolerance * batches * size)
    wrong = sum(
        stopped_after(*flipped(draw, batches, size, 10, 10 + allowed), criterion, rate=rate)
        is not None
        for _ in range(count)
    )
    wrong += sum(
        stopped_after(*tailed(draw, batches, size, tolerance), share, rate=rate) is not None
        for _ in range(count)
    )
    assert wrong <= 2 * count * rate


def test_most_of_a_lost_evaluation_is_saved():
    draw, criterion = np.random.default_rng(0), AccuracyCriterion(0.01, False, False)
    ends = [
        stopped_after(*flipped(draw, 100, 32, 64, 64 + 5 * 32), criterion) or 100 for _ in range(20)
    ]
    assert np.mean(ends) < 75
