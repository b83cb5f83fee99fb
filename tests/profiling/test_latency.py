"""Interleaved timing, by a clock that tests set."""

from __future__ import annotations

import numpy as np
import pytest

from neural_mp.profiling import (
    Ratio,
    bound_ratio,
    estimate_latency_ratio,
    measurement,
    time_interleaved_rounds,
)


class Clock:
    """A clock that only runs of models move."""

    def __init__(self):
        self.now = 0.0

    def perf_counter(self):
        return self.now

    def taking(self, seconds):
        """Return a run that takes so long, and counts how often it ran."""

        def run():
            self.now += seconds() if callable(seconds) else seconds
            run.count += 1

        run.count = 0
        return run


@pytest.fixture
def clock(monkeypatch):
    fake = Clock()
    monkeypatch.setattr(measurement, "time", fake)
    return fake


def test_a_short_run_is_timed_many_times_in_a_row_and_its_mean_counts(clock):
    short, long = clock.taking(0.001), clock.taking(0.5)
    rounds = time_interleaved_rounds([short, long], warmup=1, iterations=4, block_seconds=0.02)
    assert (short.count, long.count) == (1 + 4 * 20, 1 + 4)
    assert rounds[0] == pytest.approx([0.001] * 4)
    assert rounds[1] == pytest.approx([0.5] * 4)


def test_rounds_are_added_until_they_decide(clock):
    looked = []

    def decides(rounds):
        looked.append(len(rounds[0]))
        return len(rounds[0]) >= 20

    (rounds,) = time_interleaved_rounds(
        [clock.taking(0.1)], iterations=10, time_limit=1000, decides=decides
    )
    assert looked == [10, 15, 23]
    assert len(rounds) == 23


def test_rounds_that_never_decide_end_with_patience(clock):
    (rounds,) = time_interleaved_rounds(
        [clock.taking(0.1)],
        iterations=10,
        time_limit=2.0,
        decides=lambda rounds: False,
        patience=3.0,
    )
    assert len(rounds) == pytest.approx(61, abs=1)


@pytest.mark.slow
def test_the_spread_holds_the_truth_where_disturbances_last_several_rounds():
    """Two models as fast as each other; each is disturbed for ten rounds in a row at times."""
    covered = 0
    for seed in range(100):
        draw = np.random.default_rng(seed)
        first, second = (
            draw.uniform(1, 1.05, 200) * np.repeat(draw.choice([1.0, 2.0], 20), 10)
            for _ in range(2)
        )
        estimate = estimate_latency_ratio(first, second)
        covered += estimate.low <= 1 <= estimate.high
    assert covered >= 97


def states(draw, rounds, length, spread):
    """The state of the machine in every round, an AR(1) process that lasts `length` rounds."""
    decay, state = np.exp(-1 / length), [draw.normal()]
    for noise in draw.normal(0, np.sqrt(1 - decay**2), rounds - 1):
        state.append(decay * state[-1] + noise)
    return spread * np.array(state)


@pytest.mark.slow
@pytest.mark.parametrize(("rounds", "length"), [(60, 5), (60, 10), (120, 10), (300, 20)])
def test_the_spread_holds_the_truth_where_rounds_share_the_state_of_the_machine(rounds, length):
    """The speed of each model drifts by 2 %, besides 1 % of noise; one takes 1.2 times as long."""
    covered, runs = 0, 60
    for seed in range(runs):
        draw = np.random.default_rng(seed)
        first, second = (
            seconds * np.exp(states(draw, rounds, length, 0.02) + draw.normal(0, 0.01, rounds))
            for seconds in (1.2, 1.0)
        )
        estimate = estimate_latency_ratio(first, second)
        covered += estimate.low <= 1.2 <= estimate.high
    assert covered >= 0.9 * runs


def test_independent_rounds_leave_a_narrow_spread():
    widths = []
    for seed in range(20):
        first, second = np.exp(np.random.default_rng(seed).normal(0, 0.01, (2, 60)))
        estimate = estimate_latency_ratio(first, second)
        widths.append(estimate.high - estimate.low)
    assert np.median(widths) < 0.03


def test_a_spread_holds_the_value_of_an_earlier_measurement():
    estimate = Ratio(0.80, 0.78, 0.82)
    assert estimate.widen_to(0.85) == Ratio(0.80, 0.78, 0.85)
    assert estimate.widen_to(0.75) == Ratio(0.80, 0.75, 0.82)
    assert estimate.widen_to(0.81) == estimate


def test_a_model_that_by_chance_had_more_of_the_rare_undisturbed_rounds_is_no_faster():
    """Of two alike, one had the machine for itself in a third of 20 rounds, the other in none."""
    draw = np.random.default_rng(0)
    first, second = draw.uniform(10, 12, (2, 20))
    first[::3] = 1.0
    estimate = estimate_latency_ratio(first, second)
    assert estimate.value < 0.2
    assert estimate.high > 0.9


def test_earlier_rounds_of_long_runs_count(clock):
    run = clock.taking(0.5)
    (rounds,) = time_interleaved_rounds([run], warmup=5, iterations=6, earlier=[[0.5] * 4])
    assert len(rounds) == 6
    assert run.count == 2  # no warm-up


def test_earlier_rounds_shorter_than_a_block_do_not_count(clock):
    run = clock.taking(0.5)
    (rounds,) = time_interleaved_rounds(
        [run], warmup=2, iterations=6, earlier=[[0.5] * 4], block_seconds=0.6
    )
    assert len(rounds) == 6
    assert run.count == 2 + 6


def test_two_warm_up_rounds_of_long_runs_suffice(clock):
    short, long = clock.taking(0.01), clock.taking(0.5)
    time_interleaved_rounds([long], warmup=5, iterations=1)
    time_interleaved_rounds([short], warmup=5, iterations=1)
    assert (long.count, short.count) == (2 + 1, 5 + 1)


def test_one_warm_up_round_of_long_runs_made_just_before_suffices(clock):
    short, long = clock.taking(0.01), clock.taking(0.5)
    time_interleaved_rounds([long], warmup=5, is_warm=True, iterations=1)
    time_interleaved_rounds([short], warmup=5, is_warm=True, iterations=1)
    assert (long.count, short.count) == (1 + 1, 5 + 1)


def test_no_round_follows_rounds_that_suffice(clock):
    run = clock.taking(0.5)
    (rounds,) = time_interleaved_rounds([run], earlier=[[0.5] * 4], suffices=lambda _: True)
    assert (len(rounds), run.count) == (4, 0)


@pytest.mark.parametrize(
    ("one", "other", "bound"),
    [(4, 4, True), (2, 7, True), (7, 2, True), (3, 3, False), (2, 6, False)],
)
def test_runs_bound_a_ratio_if_noise_that_favours_one_model_is_improbable(one, other, bound):
    """Each run is slowed or not, by chance: the ratio is unbounded if all of one model are only."""
    assert bound_ratio(one, other) is bound
    draw, trials = np.random.default_rng(0), 30_000
    worst = 0.0
    for share in (0.2, 0.3, 0.5, 0.7, 0.8):
        slowed = draw.random((trials, one + other)) < share
        first, second = slowed[:, :one], slowed[:, one:]
        unbounded = (first.all(1) & ~second.any(1)) | (second.all(1) & ~first.any(1))
        worst = max(worst, float(unbounded.mean()))
    assert (worst < 0.01) is bound


def test_runs_that_are_not_in_pairs_bound_their_ratio():
    estimate = estimate_latency_ratio([1.0, 1.1] + [1.0] * 5, [4.0, 5.0])
    assert (estimate.low, estimate.high) == (1.0 / 5.0, 1.1 / 4.0)
    assert estimate.low < estimate.value < estimate.high


@pytest.mark.parametrize("rounds", [4, 5, 8])
def test_a_clear_difference_in_few_rounds_stays_clear(rounds):
    draw = np.random.default_rng(rounds)
    fast, slow = draw.uniform(1, 1.2, rounds), draw.uniform(5, 6, rounds)
    estimate = estimate_latency_ratio(fast, slow)
    assert estimate.low >= 1 / 6
    assert estimate.low <= estimate.value <= estimate.high <= 1.2 / 5


def test_a_run_that_surely_loses_takes_no_further_part(clock):
    slow, fast, other = clock.taking(0.5), clock.taking(0.1), clock.taking(0.11)
    rounds = time_interleaved_rounds(
        [slow, fast, other],
        warmup=0,
        iterations=10,
        loses=lambda seconds, fastest: len(seconds) >= 4 and min(seconds) > 2 * max(fastest),
    )
    assert [len(seconds) for seconds in rounds] == [4, 10, 10]
    assert slow.count == 4


def test_the_last_run_that_does_not_lose_ends_the_measurement(clock):
    rounds = time_interleaved_rounds(
        [clock.taking(0.5), clock.taking(0.1)],
        warmup=0,
        iterations=10,
        decides=lambda _: False,
        loses=lambda seconds, fastest: len(seconds) >= 4 and min(seconds) > 2 * max(fastest),
    )
    assert [len(seconds) for seconds in rounds] == [4, 4]


def test_noise_after_a_run_has_lost_does_not_make_its_ratio_uncertain():
    fast, slow = [1.0] * 4 + [9.0] * 20, [3.0] * 4
    assert estimate_latency_ratio(slow, fast).low > 1
    assert estimate_latency_ratio(fast, slow).high < 1
    assert estimate_latency_ratio(slow[:2], fast).low < 1  # two runs may be slowed by chance
