"""Concurrent callers of models, for the measurement of throughput."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

#: Consecutive calls of each caller: callers wait for each other only at the end.
CALLS_PER_CALLER = 4


@contextmanager
def concurrent_runs(
    runs: Sequence[Callable[[], Any]], callers: int
) -> Iterator[list[Callable[[], None]]]:
    """Context of runs that each consist of the calls of several threads.

    Every thread calls `CALLS_PER_CALLER` times. The first call of a run must have been made:
    runtimes compile at the first call.
    """
    with ThreadPoolExecutor(callers) as pool:
        yield [partial(_run_concurrently, run, callers, pool) for run in runs]


def _run_concurrently(run: Callable[[], Any], callers: int, pool: ThreadPoolExecutor) -> None:
    def run_repeatedly() -> None:
        for _ in range(CALLS_PER_CALLER):
            run()

    for future in [pool.submit(run_repeatedly) for _ in range(callers)]:
        future.result()
