"""How much memory a call needs, seen from the operating system."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import psutil


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
