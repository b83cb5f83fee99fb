"""Latencies that can be compared: in turn, so that a machine's drift hits all alike."""

from __future__ import annotations

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
    """Run each in turn, over and over; the median seconds of each.

    Args:
        runs: what to time.
        warmup: rounds not counted, at first.
        iterations: rounds counted at most.
        time_limit: seconds after which no further round starts, once three were counted.
    """
    started = time.perf_counter()
    for _ in range(warmup):
        for run in runs:
            run()
    seconds: list[list[float]] = [[] for _ in runs]
    for iteration in range(iterations):
        if iteration >= 3 and time.perf_counter() - started > time_limit:
            break
        for run, taken in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in seconds]
