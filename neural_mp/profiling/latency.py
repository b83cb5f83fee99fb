"""Latencies that can be compared: in turn, so that a machine's drift hits all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

#: How sure it is that the true ratio lies within the spread that is said.
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Ratio:
    """How long one thing takes as a share of what another takes.

    Attributes:
        value: the share, by medians.
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


def ratio(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Compare two things that were timed in turn.

    The spread is that of the ratios of single rounds, which a machine's drift leaves alone: the
    confidence interval of their median by order statistics (Conover, "Practical Nonparametric
    Statistics", 3.2). Of so few rounds that there is none, all of them.

    Args:
        seconds: of the one, a number for every round.
        reference: of the other, in the same rounds.
    """
    from scipy.stats import binom

    rounds = sorted(one / other for one, other in zip(seconds, reference, strict=True))
    outside = max(int(binom.ppf((1 - _CONFIDENCE) / 2, len(rounds), 0.5)) - 1, 0)
    value = statistics.median(seconds) / statistics.median(reference)
    low, high = rounds[outside], rounds[len(rounds) - 1 - outside]
    return Ratio(value, min(low, value), max(high, value))


def interleaved_rounds(
    runs: Sequence[Callable[[], Any]],
    *,
    warmup: int = 3,
    iterations: int = 30,
    time_limit: float = float("inf"),
) -> list[list[float]]:
    """Run each in turn, over and over, in an order drawn anew each time.

    A fixed order would favour what comes behind a small model, which leaves it the caches.

    Args:
        runs: what to time.
        warmup: rounds not counted, at first.
        iterations: rounds counted at most.
        time_limit: seconds after which no further round starts, once three were counted.

    Returns:
        The seconds of each, a number for every round.
    """
    started, order = time.perf_counter(), random.Random(0)
    for _ in range(warmup):
        for run in runs:
            run()
    seconds: list[list[float]] = [[] for _ in runs]
    for iteration in range(iterations):
        if iteration >= 3 and time.perf_counter() - started > time_limit:
            break
        for index in order.sample(range(len(runs)), len(runs)):
            start = time.perf_counter()
            runs[index]()
            seconds[index].append(time.perf_counter() - start)
    return seconds


def interleaved_medians(runs: Sequence[Callable[[], Any]], **options: Any) -> list[float]:
    """The median seconds of each, as `interleaved_rounds` times them with these options."""
    return [statistics.median(taken) for taken in interleaved_rounds(runs, **options)]
