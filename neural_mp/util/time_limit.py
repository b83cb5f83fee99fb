"""Time limit of work that may end early with what it has."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class TimeLimit:
    """A moment at which work ends.

    Attributes:
        end: the moment on the monotonic clock; infinite without a limit.
        ended_work: whether any work ended for it.
    """

    end: float = math.inf
    ended_work: bool = False

    def ends(self) -> bool:
        """Whether work must end now."""
        passed = time.monotonic() >= self.end
        self.ended_work = self.ended_work or passed
        return passed

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """Context with another end."""
        previous, self.end = self.end, end
        try:
            yield
        finally:
            self.end = previous
