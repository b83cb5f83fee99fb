"""Time limit of a run."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field


class DeadlineExceededError(Exception):
    """The time limit passed; caught by the tuner, never seen by users."""


@dataclass
class Deadline:
    """A time limit, checked after each batch."""

    seconds: float = 0.0
    started: float = field(default_factory=time.monotonic)

    def check(self) -> None:
        """Raise `DeadlineExceededError` if the time limit passed; zero seconds set no limit."""
        if self.seconds and time.monotonic() - self.started > self.seconds:
            raise DeadlineExceededError

    @property
    def end(self) -> float:
        """The end on the monotonic clock; infinite without a limit."""
        return self.started + self.seconds if self.seconds else math.inf

    def left(self) -> float:
        """Return the seconds left, as argument of another `Deadline`; 0 without a limit."""
        if not self.seconds:
            return 0.0
        return max(self.seconds - (time.monotonic() - self.started), 1e-6)
