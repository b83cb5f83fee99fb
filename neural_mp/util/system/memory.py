"""Memory limits for passes over data of unknown length, return of freed memory, and garbage."""

from __future__ import annotations

import ctypes
import gc
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from neural_mp.errors import DataError

_CONTROL_GROUP = Path("/sys/fs/cgroup")


def free_memory() -> int:
    """Return the usable memory in bytes, limited by machine and control group."""
    import psutil

    free = int(psutil.virtual_memory().available)
    try:
        limit = int((_CONTROL_GROUP / "memory.max").read_text())
        used = int((_CONTROL_GROUP / "memory.current").read_text())
        lines = (_CONTROL_GROUP / "memory.stat").read_text().splitlines()
        cached = sum(int(line.split()[1]) for line in lines if line.startswith("inactive_file "))
    except (OSError, ValueError):
        return free  # no control group, or `max`: no limit
    return max(0, min(free, limit - used + cached))


def describe_shortage(size: int) -> str:
    """Return as text that so many bytes exceed the usable memory; empty if they do not."""
    free = free_memory()
    if size <= free:
        return ""
    return f"requires {size >> 20} MiB of memory, and {free >> 20} MiB are free"


@cache
def _find_malloc_trim() -> Callable[[int], int] | None:
    """Return glibc's `malloc_trim`; None with another allocator."""
    library = ctypes.CDLL(None) if sys.platform == "linux" else None
    function: Callable[[int], int] | None = getattr(library, "malloc_trim", None)
    return function


class _FreedMemory:
    """Bytes of arrays that the process made since it last returned freed memory."""

    def __init__(self) -> None:
        self._bytes = 0

    def note_freed_bytes(self, size: int) -> None:
        """Note arrays of `size` bytes; return memory once in a while."""
        self._bytes += size
        if self._bytes >= _TRIMMED_BYTES:
            self.return_memory()

    def return_memory(self) -> None:
        """Return memory to the system."""
        self._bytes = 0
        trim = _find_malloc_trim()
        if trim is not None:
            trim(0)


#: Return of freed memory to the system, during work with many large intermediate results:
#: otherwise, glibc keeps what was freed between arrays that stay, up to several times their size.
FREED = _FreedMemory()
#: Intermediate results of rounding a weight, or of a block, as large as the weight or the inputs of
#: the block, at most.
MAX_RESULTS = 16
#: Bytes of arrays between two returns of freed memory.
_TRIMMED_BYTES = 1 << 25
#: Seconds between checks.
_CHECK_SECONDS = 1.0
#: A pass is stopped if less than this fraction of the initially free memory is left, …
_MIN_FREE_FRACTION = 0.1
#: … and this process allocated more than this fraction.
_MIN_OWN_FRACTION = 0.5


class MemoryGuard:
    """Checks the memory once per second of a pass.

    Args:
        name: name of the data.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._free, self._held = free_memory(), _resident_memory_bytes()
        self._checked = time.monotonic()

    def check_memory(self, batches: int) -> None:
        """Check the memory if a check is due, after a number of batches.

        Raises:
            DataError: nearly all free memory is used, mostly by this pass.
        """
        if time.monotonic() - self._checked < _CHECK_SECONDS:
            return
        self._checked = time.monotonic()
        used = _resident_memory_bytes() - self._held
        if (
            free_memory() < self._free * _MIN_FREE_FRACTION
            and used > self._free * _MIN_OWN_FRACTION
        ):
            raise DataError(
                f"{batches} batches of {self.name} left {used >> 20} MiB allocated, nearly all of "
                f"the {self._free >> 20} MiB that were free; set max_batches "
                f"(evaluation.accuracy.max_batches in YAML), or use a metric that stores less"
            )


def _resident_memory_bytes() -> int:
    import psutil

    return int(psutil.Process().memory_info().rss)


def read_peak_bytes() -> int:
    """Return the largest memory that this process has occupied so far, in bytes.

    The present memory where the system has no record of the largest.
    """
    try:
        import resource
    except ImportError:  # Windows
        import psutil

        memory = psutil.Process().memory_info()
        return int(getattr(memory, "peak_wset", memory.rss))
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Collect no garbage in this context: imports and graphs leave little, but trigger much.

    After an import, all objects count as old. Otherwise, a full collection would soon search what
    was imported, in the middle of a run.
    """
    enabled, modules = gc.isenabled(), len(sys.modules)
    gc.disable()
    try:
        yield
    finally:
        # Unfreezing would undo what the program froze itself.
        if len(sys.modules) > modules and not gc.get_freeze_count():
            gc.freeze()
            gc.unfreeze()
        if enabled:
            gc.enable()
