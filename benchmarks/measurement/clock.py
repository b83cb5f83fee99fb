"""What the parts of a job take."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Times parts of a job by their names.

    Attributes:
        parts: part → CPU seconds of the process, and seconds by the clock.
    """

    def __init__(self) -> None:
        self.parts: dict[str, tuple[float, float]] = {}

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Time what is done within."""
        start = time.process_time(), time.perf_counter()
        yield
        self.parts[name] = (time.process_time() - start[0], time.perf_counter() - start[1])
