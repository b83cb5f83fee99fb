"""Latencies that can be compared: in turn, so that a machine's drift hits all alike."""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

#: How sure it is that the true ratio lies within the spread that is said.
_CONFIDENCE = 0.95
#: The share of rounds that counts as undisturbed by what else the machine does.
_UNDISTURBED = 0.1
#: How often rounds are drawn anew to tell the spread.
_DRAWS = 300


@dataclass(frozen=True)
class Ratio:
    """How long one thing takes as a share of what another takes.

    Attributes:
        value: the share.
        low, high: between which it lies with a confidence of 95 %.
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
    return float(np.quantile(seconds, _UNDISTURBED))


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Compare two things that were timed in turn, by what they take undisturbed.

    The spread is that of a bootstrap over rounds, which leaves the two of a round together (Efron
    and Tibshirani, "An Introduction to the Bootstrap", 1993, chapter 13). The draws are the same
    on every call.

    Args:
        seconds: of the one, a number for every round.
        reference: of the other, in the same rounds.
    """
    taken = np.array([seconds, reference])
    count = taken.shape[1]
    drawn = np.random.default_rng(0).integers(0, count, (_DRAWS, count))
    one, other = np.quantile(taken[:, drawn], _UNDISTURBED, axis=2)
    tail = (1 - _CONFIDENCE) / 2
    low, high = np.quantile(one / other, (tail, 1 - tail))
    value = undisturbed(seconds) / undisturbed(reference)
    return Ratio(value, min(float(low), value), max(float(high), value))


def interleaved_rounds(
    runs: Sequence[Callable[[], Any]],
    *,
    warmup: int = 3,
    iterations: int = 30,
    least_seconds: float = 0.0,
    time_limit: float = float("inf"),
) -> list[list[float]]:
    """Run each in turn, over and over, in an order drawn anew each time.

    A fixed order would favour what comes behind a small model, which leaves it the caches.

    Args:
        runs: what to time.
        warmup: rounds not counted, at first.
        iterations: rounds counted.
        least_seconds: seconds for which to go on beyond them: short runs need more rounds.
        time_limit: seconds after which no further round starts, once three were counted.

    Returns:
        The seconds of each, a number for every round.
    """
    started, order = time.perf_counter(), random.Random(0)
    for _ in range(warmup):
        for run in runs:
            run()
    seconds: list[list[float]] = [[] for _ in runs]
    for iteration in itertools.count():
        passed = time.perf_counter() - started
        if iteration >= iterations and passed > least_seconds:
            break
        if iteration >= 3 and passed > time_limit:
            break
        for index in order.sample(range(len(runs)), len(runs)):
            start = time.perf_counter()
            runs[index]()
            seconds[index].append(time.perf_counter() - start)
    return seconds


def interleaved_medians(runs: Sequence[Callable[[], Any]], **options: Any) -> list[float]:
    """The median seconds of each, as `interleaved_rounds` times them with these options."""
    return [statistics.median(taken) for taken in interleaved_rounds(runs, **options)]
