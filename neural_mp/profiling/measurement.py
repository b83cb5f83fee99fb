"""Latency measurement in interleaved rounds, so that machine drift affects all runs alike."""

from __future__ import annotations

import itertools
import math
import os
import random
import statistics
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import numpy as np
import psutil

from neural_mp.util.system.memory import FREED
from neural_mp.util.system.watched_thread import watch_calls

#: Confidence level of the interval of a ratio. Above 95 %, because rounds are added until the
#: interval is conclusive, so bounds are tested several times.
_CONFIDENCE = 0.99
#: Quantile of the rounds that estimates the uncontended latency.
_LATENCY_QUANTILE = 0.1
#: Number of bootstrap samples per block length, in total and per batch.
_BOOTSTRAP_SAMPLES, _DRAWS_AT_ONCE = 500, 100
#: Number of the longest blocks: fewer would cover longer states of the machine, at the price of
#: wider intervals.
_LONG_BLOCKS = 8
#: Growth factor of the number of rounds between two tests for a conclusive interval.
_NEXT_LOOK = 1.5
#: Minimum number of rounds, regardless of the time limit.
_LEAST_ROUNDS = 3
#: Seconds of warm-up rounds after which the second run of each model, or a later one, is the last.
_WARM_UP_SECONDS = 0.25
#: Maximum number of runs per block.
_MAX_RUNS = 1000
#: Seconds of a computation that determines the share of a CPU.
_SHARE_SECONDS = 0.05


@dataclass(frozen=True)
class Ratio:
    """Ratio of two latencies.

    Attributes:
        low, high: bounds of the 99 % confidence interval.
    """

    value: float
    low: float
    high: float

    @property
    def inverse(self) -> Ratio:
        """The inverse ratio (speedup)."""
        return Ratio(1 / self.value, 1 / self.high, 1 / self.low)

    def widen_to(self, value: float) -> Ratio:
        """Return the ratio with an interval that contains the value of an earlier measurement.

        Between measurements, the state of the machine changes more than within one.
        """
        return Ratio(self.value, min(self.low, value), max(self.high, value))

    def __str__(self) -> str:
        return f"{self.value:.2f}× ({self.low:.2f} to {self.high:.2f})"


def estimate_uncontended_latency(seconds: Sequence[float]) -> float:
    """Return the uncontended latency: the first decile of all rounds.

    On a shared machine, other processes slow down about half of the runs, so the median is
    unstable: it falls among the slow or the fast runs by chance.
    """
    return float(np.quantile(seconds, _LATENCY_QUANTILE))


def estimate_latency_ratio(seconds: Sequence[float], reference: Sequence[float]) -> Ratio:
    """Return the ratio of the uncontended latencies of two interleaved runs, one per round each.

    The confidence interval is from a paired block bootstrap over rounds, as consecutive rounds
    share the state of the machine (Künsch, "The jackknife and the bootstrap for general stationary
    observations", Ann. Statist. 17, 1989), with a fixed seed. The wider interval of two block
    lengths counts: short blocks, and an eighth of the rounds for states that last longer. Each is
    scaled by Student's t quantile for its number of blocks. If uncontended rounds are rare, chance
    favours either run; therefore the interval is extended to the median of the per-round ratios.
    If the runs `bound_ratio`, from four rounds on, the bounds are within the ratios of any two:
    Student's t quantile of two blocks would otherwise make every difference uncertain. These ratios
    are the bounds for runs that are not in pairs, and for a run that was surely slower and has
    fewer rounds: those of the first runs, if they are enough, so that noise in the others does not
    make a difference uncertain again.
    """
    value = estimate_uncontended_latency(seconds) / estimate_uncontended_latency(reference)
    if len(seconds) != len(reference):
        few = min(len(seconds), len(reference))
        count = few if bound_ratio(few, few) else None
        low, high = _crossed_ratios(seconds[:count], reference[:count])
        return Ratio(value, min(low, value), max(high, value))
    crossed = _crossed_ratios(seconds, reference)
    rounds = np.array([seconds, reference])
    count = rounds.shape[1]
    paired = float(np.median(rounds[0] / rounds[1]))
    bounds = [value, paired]
    for length in {max(1, round(count ** (1 / 3))), max(1, count // _LONG_BLOCKS)}:
        bounds += _estimate_bootstrap_interval(rounds, value, length)
    low, high = min(bounds), max(bounds)
    if bound_ratio(count, count):
        low, high = max(low, crossed[0]), min(high, crossed[1])
    return Ratio(value, low, high)


def _crossed_ratios(seconds: Sequence[float], reference: Sequence[float]) -> tuple[float, float]:
    """Return the least and the largest ratio of any two runs."""
    return min(seconds) / max(reference), max(seconds) / min(reference)


@cache
def bound_ratio(first: int, second: int) -> bool:
    """Whether the ratio of two models is within those of any two runs, by their numbers of runs.

    For noise to cause another ratio, it must slow all runs of one model and none of the other. If
    it slows runs independently, whatever its probability, four runs of both rule that out at the
    confidence level, or two and seven.
    """
    slowed = np.linspace(0, 1, 101)
    chances = slowed**first * (1 - slowed) ** second + slowed**second * (1 - slowed) ** first
    return bool(chances.max() < 1 - _CONFIDENCE)


def _estimate_bootstrap_interval(rounds: np.ndarray, value: float, length: int) -> list[float]:
    """Return the bounds of the confidence interval by blocks of `length` rounds."""
    draw, count = np.random.default_rng(0), rounds.shape[1]
    ratios: list[float] = []
    while len(ratios) < _BOOTSTRAP_SAMPLES:
        # Indices of resampled rounds, [draws, count], in circular blocks of consecutive rounds.
        starts = draw.integers(0, count, (_DRAWS_AT_ONCE, -(-count // length), 1))
        drawn = (starts + np.arange(length)) % count
        drawn = drawn.reshape(_DRAWS_AT_ONCE, -1)[:, :count]
        latencies, references = np.quantile(rounds[:, drawn], _LATENCY_QUANTILE, axis=2)
        ratios += (latencies / references).tolist()
    tail = (1 - _CONFIDENCE) / 2
    ends = np.log(np.quantile(ratios, (tail, 1 - tail)) / value)
    scale = _small_sample_factor(max(2, count // length), tail)
    return [float(end) for end in value * np.exp(ends * scale)]


@cache
def _small_sample_factor(blocks: int, tail: float) -> float:
    """Return the factor of an interval that is bootstrapped from few independent blocks."""
    with warnings.catch_warnings():  # SciPy adds a filter, which is the program's to choose
        from scipy.special import ndtri, stdtrit

    quantiles = stdtrit(blocks - 1, tail) / ndtri(tail)
    return float(quantiles * math.sqrt(blocks / (blocks - 1)))


def measure_cpu_share() -> float:
    """Return the fraction of a CPU that this thread gets while other processes compute, too."""
    started, used = time.perf_counter(), time.thread_time()
    while time.perf_counter() - started < _SHARE_SECONDS:
        pass
    return (time.thread_time() - used) / (time.perf_counter() - started)


def read_other_cpu_seconds() -> float:
    """Return the seconds for which others have used the CPUs of this process since the start.

    Others are processes, interrupts, and other virtual machines on the same processors.
    """
    cores = psutil.cpu_times(percpu=True)
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(len(cores))
    fields = ("user", "nice", "system", "irq", "softirq", "steal")
    used = sum(
        getattr(core, name, 0.0)
        for index, core in enumerate(cores)
        if index in allowed
        for name in fields
    )
    return used - time.process_time()


def time_interleaved_rounds(
    runs: Sequence[Callable[[], Any]],
    *,
    in_cpu_seconds: bool = False,
    warmup: int = 3,
    is_warm: bool = False,
    iterations: int = 30,
    least_seconds: float = 0.0,
    time_limit: float = float("inf"),
    block_seconds: float = 0.0,
    decides: Callable[[list[list[float]]], bool] | None = None,
    patience: float = 1.0,
    most_iterations: int | None = None,
    earlier: Sequence[Sequence[float]] = (),
    suffices: Callable[[list[list[float]]], bool] | None = None,
    loses: Callable[[list[float], list[float]], bool] | None = None,
) -> list[list[float]]:
    """Time runs in interleaved rounds, with a random order in each round.

    In a fixed order, a run after a small model would always find warm caches.

    Args:
        runs: functions to time.
        in_cpu_seconds: whether to count CPU seconds of this process. For runs of one thread, these
            leave out the seconds in which other processes had the CPU.
        warmup: maximum number of warm-up rounds; of long runs, two suffice, or a few.
        is_warm: whether each run was made just before: one warm-up round of long runs suffices
            then. Rounds of other runs alone do not count as rounds: only in one measurement do all
            runs share the states of the machine.
        iterations: minimum number of measured rounds.
        least_seconds: minimum duration in seconds: short runs need more rounds.
        time_limit: seconds after which no round starts, except for the first three.
        block_seconds: minimum duration of a block: shorter runs are repeated and averaged.
        decides: whether the rounds so far are conclusive; rounds are added until they are.
        patience: limit of these additional rounds, as a multiple of `time_limit`.
        most_iterations: maximum number of rounds; None for no limit.
        earlier: for each run, the seconds of rounds of warm runs just measured; ignored if any is
            shorter than a block.
        suffices: whether the rounds so far need no more, whatever their number.
        loses: whether a run is surely slower than the fastest, by the rounds of both: it takes no
            further part, and the last run ends the measurement.

    Returns:
        For each run, the seconds of each round that it took part in, from the first on.
    """
    order, lengths = random.Random(0), [1] * len(runs)
    clock = time.process_time if in_cpu_seconds else time.perf_counter
    rounds: list[list[float]] = [list(seconds) for seconds in earlier]
    if not rounds or min(map(min, rounds)) < block_seconds:
        rounds = [[] for _ in runs]
        warming = 0.0
        for number in range(warmup):
            seconds = [_mean_run_seconds(run, 1, clock) for run in runs]
            lengths = [min(_MAX_RUNS, max(1, round(block_seconds / max(d, 1e-9)))) for d in seconds]
            warming += sum(seconds)
            if (number or is_warm) and warming > _WARM_UP_SECONDS:
                break
    spent, started, look = sum(map(sum, rounds)), time.perf_counter(), 0.0
    active = list(range(len(runs)))
    for iteration in itertools.count(len(rounds[0])):
        if iteration == most_iterations or (suffices is not None and suffices(rounds)):
            break
        passed = spent + time.perf_counter() - started
        late = iteration >= _LEAST_ROUNDS and passed > time_limit
        if late or (iteration >= iterations and passed > least_seconds):
            if decides is None or (late and passed > patience * time_limit):
                break
            if iteration >= look:
                if decides(rounds):
                    break
                look = iteration * _NEXT_LOOK
        if loses is not None and iteration:
            fastest = min(active, key=lambda index: estimate_uncontended_latency(rounds[index]))
            active = [i for i in active if i == fastest or not loses(rounds[i], rounds[fastest])]
            if len(active) == 1 < len(runs):
                break
        for index in order.sample(active, len(active)):
            rounds[index].append(_mean_run_seconds(runs[index], lengths[index], clock))
    return rounds


def _mean_run_seconds(run: Callable[[], Any], times: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(times):
        run()
    return (clock() - start) / times


def time_interleaved_medians(runs: Sequence[Callable[[], Any]], **options: Any) -> list[float]:
    """Return the median seconds of each run; options as for `time_interleaved_rounds`."""
    return [statistics.median(seconds) for seconds in time_interleaved_rounds(runs, **options)]


@dataclass(frozen=True)
class MemoryGrowth:
    """Peak growth of a process's resident memory, in bytes.

    Attributes:
        total: of all pages.
        anonymous: without pages of files, which the system drops when memory is short.
    """

    total: int
    anonymous: int


def measure_memory_growth(run: Callable[[], Any], interval: float = 0.001) -> MemoryGrowth:
    """Return the peak growth of the process's resident memory during `run`.

    Freed memory that the allocator holds is returned before, since its use would not count. Memory
    is sampled every `interval` seconds; shorter peaks can be missed.
    """
    process = psutil.Process()
    FREED.return_memory()
    start = peak = _read_resident_bytes(process)
    done = threading.Event()

    def update_peak() -> None:
        nonlocal peak
        peak = tuple(map(max, peak, _read_resident_bytes(process)))

    def watch_memory() -> None:
        while not done.wait(interval):
            update_peak()

    watcher = threading.Thread(target=watch_memory, daemon=True)
    watcher.start()
    try:
        run()
        update_peak()
    finally:
        done.set()
        watcher.join()
    return MemoryGrowth(*(most - least for most, least in zip(peak, start, strict=True)))


def _read_resident_bytes(process: psutil.Process) -> tuple[int, ...]:
    """Return the resident bytes of a process: all, and those that belong to no file."""
    memory = process.memory_info()
    return memory.rss, memory.rss - getattr(memory, "shared", 0)


#: Consecutive calls of each caller: callers wait for each other only at the end.
CALLS_PER_CALLER = 4


@contextmanager
def make_concurrent_runs(
    runs: Sequence[Callable[[], Any]], callers: int
) -> Iterator[list[Callable[[], None]]]:
    """Context of runs that each consist of the calls of several threads.

    Every thread calls `CALLS_PER_CALLER` times. The first call of a run must have been made:
    runtimes compile at the first call.
    """
    with ThreadPoolExecutor(callers) as pool:
        yield [partial(_run_concurrently, run, callers, pool) for run in runs]


@watch_calls("the model")
def _run_concurrently(run: Callable[[], Any], callers: int, pool: ThreadPoolExecutor) -> None:
    def run_repeatedly() -> None:
        for _ in range(CALLS_PER_CALLER):
            run()

    for future in [pool.submit(run_repeatedly) for _ in range(callers)]:
        future.result()
