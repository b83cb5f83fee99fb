"""A pass over data that nobody knows the end of ends before the memory does."""

from __future__ import annotations

import time
from pathlib import Path

from neural_mp.errors import DataError

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Bytes that can still be used, by the machine's account and by that of the control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return free  # no such group, or `max`: it sets no limit
    return max(0, min(free, limit - used + cached))


#: Seconds between two looks.
_LOOK_AGAIN = 1.0
#: A pass ends when no more than this share is left of what was free when it began, …
_MIN_FREE_FRACTION = 0.1
#: … if this share was taken by this process, and not by others.
_MIN_OWN_FRACTION = 0.5


class MemoryGuard:
    """Looks at the memory every second of a pass.

    Args:
        name: of the data.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._free, self._held = free_memory(), _held()
        self._looked = time.monotonic()

    def check(self, batches: int) -> None:
        """Look, if it is time to.

        Args:
            batches: how many were read.

        Raises:
            DataError: nearly all memory that was free is taken, most of it by this pass.
        """
        if time.monotonic() - self._looked < _LOOK_AGAIN:
            return
        self._looked = time.monotonic()
        taken = _held() - self._held
        if (
            free_memory() < self._free * _MIN_FREE_FRACTION
            and taken > self._free * _MIN_OWN_FRACTION
        ):
            raise DataError(
                f"{self.name} has given {batches} batches, and what is kept of them takes "
                f"{taken >> 20} MiB, nearly all memory that was free; set max_batches "
                f"(evaluation.accuracy.max_batches in YAML), or give a metric that keeps less"
            )


def _held() -> int:
    """Bytes that this process takes."""
    import psutil

    return int(psutil.Process().memory_info().rss)
