"""A clock that stands still until a test lets seconds pass: no machine is too slow for a limit."""

from __future__ import annotations

import time
from types import ModuleType

import pytest


class StillClock:
    """Takes the place of the module `time` in modules under test.

    Attributes:
        now: the seconds that every clock shows.
    """

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now
        self._looks = 0

    def keep_time_of(self, monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
        """Let modules read this clock."""
        for module in modules:
            monkeypatch.setattr(module, "time", self)

    def monotonic(self) -> float:
        """Return the seconds, as every clock of `time`."""
        self._looks += 1
        return self.now

    perf_counter = process_time = thread_time = monotonic

    def sleep(self, seconds: float) -> None:
        """Let seconds pass."""
        self.now += seconds

    def let_pass_in_view(self, seconds: float, step: float = 0.05) -> None:
        """Let seconds pass in steps, each of which another thread sees, twice."""
        end = self.now + seconds
        while self.now < end:
            self.now = min(end, self.now + step)
            seen = self._looks + 2
            while self._looks < seen:
                time.sleep(0.001)
