"""Interruption of pure computations that take too long, and work that may end early."""

from __future__ import annotations

import ctypes
import math
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

_POLL_SECONDS = 0.1
#: File of the code that runs while a module is imported.
_IMPORT_FILE = "<frozen importlib._bootstrap>"
#: CPU seconds after which an interruption that some code has swallowed is repeated.
_REPEAT_SECONDS = 2.0
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)


def raise_in_thread(thread: int, kind: type[BaseException]) -> None:
    """Raise an exception in the Python code of a thread, at its next instruction."""
    _set_exception(thread, kind)


class TimeLimitError(BaseException):
    """Raised within code that took too long; no `Exception`, which that code may catch.

    Attributes:
        seconds: the limit, in CPU seconds.
    """

    seconds: float = 0.0


@contextmanager
def interrupt_after_seconds(seconds: float, within: str) -> Iterator[None]:
    """Interrupt the code of this context after some CPU seconds of its thread.

    The code is interrupted only within a package of pure functions, and not while a module is
    imported: anywhere else, an exception could leave a global state half changed.

    Args:
        seconds: limit of CPU seconds, which other processes on the machine do not use up.
        within: name of the package.

    Raises:
        TimeLimitError: the code was interrupted.
    """
    limit = type("TimeLimitError", (TimeLimitError,), {"seconds": seconds})
    thread, ended = threading.get_ident(), threading.Event()
    # The CPU clock of the thread; None on systems without.
    clock = time.pthread_getcpuclockid(thread) if hasattr(time, "pthread_getcpuclockid") else None
    begun = _read_clock_seconds(clock)
    imports = _count_imports(sys._getframe())

    def watch_clock() -> None:
        due = begun + seconds
        while not ended.wait(_POLL_SECONDS):
            if _read_clock_seconds(clock) < due:
                continue
            frame = sys._current_frames().get(thread)
            if frame is None or within not in Path(frame.f_code.co_filename).parts:
                continue
            if _count_imports(frame) > imports:
                continue
            raise_in_thread(thread, limit)
            due = _read_clock_seconds(clock) + _REPEAT_SECONDS

    watcher = threading.Thread(target=watch_clock, name="neural_mp time limit", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        ended.set()
        watcher.join()


def _read_clock_seconds(clock: int | None) -> float:
    return time.monotonic() if clock is None else time.clock_gettime(clock)


def _count_imports(frame: FrameType | None) -> int:
    """Return the number of frames of import machinery: imports under way, some frames each."""
    count = 0
    while frame is not None:
        count += frame.f_code.co_filename == _IMPORT_FILE
        frame = frame.f_back
    return count


@dataclass
class TimeLimit:
    """A moment at which work ends.

    Attributes:
        end: the moment on the monotonic clock; infinite without a limit.
        ended_work: whether any work ended for it.
    """

    end: float = math.inf
    ended_work: bool = False

    def is_reached(self) -> bool:
        """Whether work must end now."""
        passed = time.monotonic() >= self.end
        self.ended_work = self.ended_work or passed
        return passed

    @contextmanager
    def override_end(self, end: float) -> Iterator[None]:
        """Context with another end."""
        previous, self.end = self.end, end
        try:
            yield
        finally:
            self.end = previous
