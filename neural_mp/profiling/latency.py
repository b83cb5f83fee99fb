"""Latencies that can be compared: in turn, so that a machine's drift hits all alike."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any


def interleaved_medians(
    runs: Sequence[Callable[[], Any]],
    *,
    warmup: int = 3,
    iterations: int = 30,
    time_limit: float = float("inf"),
) -> list[float]:
    """Run each in turn, over and over, in an order drawn anew each time; their median seconds.

    A fixed order would favour what comes behind a small model, which leaves it the caches.

    Args:
        runs: what to time.
        warmup: rounds not counted, at first.
        iterations: rounds counted at most.
        time_limit: seconds after which no further round starts, once three were counted.
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
    return [statistics.median(taken) for taken in seconds]
