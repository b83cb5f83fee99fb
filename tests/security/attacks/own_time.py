"""Time limits that count no time in which other processes had the processor."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Seconds between two readings of a clock.
_TICK = 0.5


@dataclass(frozen=True)
class _Scheduled:
    """Nanoseconds of a thread: on a processor, and in the queue for one."""

    running: int
    waiting: int


class OwnClock:
    """Seconds that a process with its children ran or slept.

    A loop and a deadlock both take such seconds, while the queue for a busy processor takes none.
    Between two readings, the wait of all threads is shared out by their time on a processor. Linux
    says how long threads wait; on other systems, the seconds are those of a clock on the wall.

    Args:
        pid: of the process.
    """

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._seconds = 0.0
        self._at, self._threads = time.monotonic(), _threads(pid)

    def seconds(self) -> float:
        """Seconds since the clock was made."""
        at, threads = time.monotonic(), _threads(self._pid)
        none = _Scheduled(0, 0)
        pairs = [(now, self._threads.get(name, none)) for name, now in threads.items()]
        running = sum(now.running - previous.running for now, previous in pairs) / 1e9
        waiting = sum(now.waiting - previous.waiting for now, previous in pairs) / 1e9
        passed, active = at - self._at, running + waiting
        withheld = min(passed, active) * waiting / active if active > 0 else 0.0
        self._seconds += passed - withheld
        self._at, self._threads = at, threads
        return self._seconds


def _threads(pid: int) -> dict[str, _Scheduled]:
    """Return the times of the threads of a process and its children by their numbers."""
    threads: dict[str, _Scheduled] = {}
    pending = [str(pid)]
    while pending:
        with contextlib.suppress(OSError):  # a process may end meanwhile
            for task in Path("/proc", pending.pop(), "task").iterdir():
                with contextlib.suppress(OSError):
                    running, waiting, _ = map(int, (task / "schedstat").read_text().split())
                    threads[task.name] = _Scheduled(running, waiting)
                    pending += (task / "children").read_text().split()
    return threads


class TooLongError(BaseException):
    """The time is up; no `except Exception` on the way may swallow it."""


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLongError` inside after this many own seconds; in the main thread only."""
    assert threading.current_thread() is threading.main_thread()
    clock = OwnClock(os.getpid())

    def look(*_: Any) -> None:
        remaining = seconds - clock.seconds()
        if remaining <= 0:
            raise TooLongError
        signal.setitimer(signal.ITIMER_REAL, min(remaining, _TICK))

    handler = signal.signal(signal.SIGALRM, look)
    signal.setitimer(signal.ITIMER_REAL, min(seconds, _TICK))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, handler)


def ends_within(process: multiprocessing.Process, seconds: float) -> bool:
    """Wait until a process ends; say whether it does within so many own seconds."""
    assert process.pid is not None
    clock = OwnClock(process.pid)
    while process.is_alive() and clock.seconds() < seconds:
        process.join(_TICK)
    return not process.is_alive()


def communicated(process: subprocess.Popen[str], seconds: float) -> tuple[str, str]:
    """Return what a process writes until it ends.

    Args:
        process: with pipes.
        seconds: own seconds after which it is killed.

    Raises:
        TooLongError: it did not end before.
    """
    clock = OwnClock(process.pid)
    while True:
        try:
            return process.communicate(timeout=_TICK)
        except subprocess.TimeoutExpired:
            if clock.seconds() < seconds:
                continue
            process.kill()
            process.communicate()
            raise TooLongError from None
