"""Latencies that can be compared: in turn, so that a machine's drift hits all alike."""

from __future__ import annotations

import itertools
import random
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil

#: How sure it is that the true ratio lies within the spread that is said. Rounds are added while a
#: spread decides nothing, and a bound that is looked at several times needs more than 95 %.
_CONFIDENCE = 0.99
#: The share of rounds that counts as undisturbed by what else the machine does.
_LATENCY_QUANTILE = 0.1
#: How often rounds are drawn anew to tell the spread, and how many of the draws at a time.
_BOOTSTRAP_SAMPLES, _DRAWS_AT_ONCE = 1000, 100
#: The next look at rounds that decide nothing comes after so many times as many.
_NEXT_LOOK = 1.5
#: Rounds counted at least, however long they take.
_LEAST_ROUNDS = 3
#: Runs of one block at most.
_MAX_RUNS = 1000


@dataclass(frozen=True)
class Ratio:
    """How long one thing takes as a share of what another takes.

    Attributes:
        value: the share.
        low, high: between which it lies with a confidence of 99 %.
    """

    value: float
    low: float
    high: float

    @property
    def inverse(self) -> Ratio:
        """How many times as fast the one is as the other."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f} to {self.high:.2f})"


def undisturbed(seconds: Sequence[float]) -> float:
    """What one run takes where nothing else runs meanwhile: the first decile of all rounds.

    On a machine that is shared, other processes take from every second run; a median then falls
    among the runs that were cut short one time, and among the others the next.
    """
    return float(np.quantile(seconds, _LATENCY_QUANTILE))


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Compare two things that were timed in turn, by what they take undisturbed.

    The spread is that of a bootstrap over rounds, which leaves the two of a round together, and
    rounds that follow each other in blocks: what disturbs one round disturbs the next (Künsch, "The
    jackknife and the bootstrap for general stationary observations", Ann. Statist. 17, 1989). The
    draws are the same on every call. Where undisturbed rounds are rare, chance gives one of the two
    more of them; so the spread holds the median of the shares round by round, too.

    Args:
        seconds: of the one, a number for every round.
        reference: of the other, in the same rounds.
    """
    taken = np.array([seconds, reference])
    count, draw = taken.shape[1], np.random.default_rng(0)
    shares: list[float] = []
    while len(shares) < _BOOTSTRAP_SAMPLES:
        drawn = _drawn_blocks(draw, count)
        one, other = np.quantile(taken[:, drawn], _LATENCY_QUANTILE, axis=2)
        shares += (one / other).tolist()
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(shares, (tail, 1 - tail))
    value = undisturbed(seconds) / undisturbed(reference)
    paired = float(np.median(taken[0] / taken[1]))
    return Ratio(value, min(float(low), value, paired), max(float(high), value, paired))


def _drawn_blocks(draw: np.random.Generator, count: int) -> np.ndarray:
    """Numbers of rounds drawn anew, [draws, count]: blocks of rounds in a row, from anywhere."""
    length = max(1, round(count ** (1 / 3)))
    starts = draw.integers(0, count, (_DRAWS_AT_ONCE, -(-count // length), 1))
    drawn = (starts + np.arange(length)) % count
    return drawn.reshape(_DRAWS_AT_ONCE, -1)[:, :count]


def interleaved_rounds(
    runs: Sequence[Callable[[], Any]],
    *,
    warmup: int = 3,
    iterations: int = 30,
    least_seconds: float = 0.0,
    time_limit: float = float("inf"),
    block_seconds: float = 0.0,
    decides: Callable[[list[list[float]]], bool] | None = None,
    patience: float = 1.0,
) -> list[list[float]]:
    """Run each in turn, over and over, in an order drawn anew each time.

    A fixed order would favour what comes behind a small model, which leaves it the caches.

    Args:
        runs: what to time.
        warmup: rounds not counted, at first.
        iterations: rounds counted.
        least_seconds: seconds for which to go on beyond them: short runs need more rounds.
        time_limit: seconds after which no further round starts, once three were counted.
        block_seconds: what runs faster is run several times in a row for so long; the mean counts.
        decides: whether the rounds so far decide what is asked; rounds are added while they do not.
        patience: how many times `time_limit` that may take.

    Returns:
        The seconds of each, a number for every round.
    """
    order, lengths = random.Random(0), [1] * len(runs)
    for number in range(warmup):
        for index, run in enumerate(runs):
            seconds = _seconds(run, 1)
            if number == warmup - 1:
                lengths[index] = min(_MAX_RUNS, max(1, round(block_seconds / max(seconds, 1e-9))))
    started, look = time.perf_counter(), 0.0
    taken: list[list[float]] = [[] for _ in runs]
    for iteration in itertools.count():
        passed = time.perf_counter() - started
        late = iteration >= _LEAST_ROUNDS and passed > time_limit
        if late or (iteration >= iterations and passed > least_seconds):
            if decides is None or (late and passed > patience * time_limit):
                break
            if iteration >= look:
                if decides(taken):
                    break
                look = iteration * _NEXT_LOOK
        for index in order.sample(range(len(runs)), len(runs)):
            taken[index].append(_seconds(runs[index], lengths[index]))
    return taken


def _seconds(run: Callable[[], Any], times: int) -> float:
    """The mean seconds of so many runs in a row."""
    start = time.perf_counter()
    for _ in range(times):
        run()
    return (time.perf_counter() - start) / times


def interleaved_medians(runs: Sequence[Callable[[], Any]], **options: Any) -> list[float]:
    """The median seconds of each, as `interleaved_rounds` times them with these options."""
    return [statistics.median(taken) for taken in interleaved_rounds(runs, **options)]


def peak_growth(run: Callable[[], Any], interval: float = 0.001) -> int:
    """Bytes by which the process's resident memory grows at most while `run` runs.

    Args:
        run: what to measure.
        interval: seconds between two readings; what lives for less than that can be missed.
    """
    process = psutil.Process()
    start = process.memory_info().rss
    peak = start
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(interval):
            peak = max(peak, process.memory_info().rss)

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        run()
        peak = max(peak, process.memory_info().rss)
    finally:
        done.set()
        watcher.join()
    return peak - start
