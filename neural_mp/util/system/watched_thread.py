"""Watched threads, whose calls are ended if they never return, and interruption of computations.

Computations are interrupted that take too long; work may also end early.
"""

from __future__ import annotations

import contextvars
import ctypes
import math
import sys
import sysconfig
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from types import CodeType, FrameType
from typing import Any, TypeVar

_POLL_SECONDS = 0.1
#: File of the code that runs while a module is imported.
_IMPORT_FILE = "<frozen importlib._bootstrap>"
#: CPU seconds after which an interruption that some code has swallowed is repeated.
_REPEAT_SECONDS = 2.0
_set_exception = ctypes.pythonapi.PyThreadState_SetAsyncExc
_set_exception.argtypes = (ctypes.c_ulong, ctypes.py_object)
F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")
#: The local variables of a call.
Locals = Mapping[str, Any]

_PACKAGE = Path(__file__).resolve().parents[2]
#: Folders of code that is not the user's own.
_LIBRARIES = (
    _PACKAGE,
    *map(Path, {*sysconfig.get_paths().values()} - {sysconfig.get_path("data")}),
)


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


class CallEndedError(BaseException):
    """Raised within a call that is ended; no `Exception`, which that code may catch."""


@dataclass(frozen=True)
class _Watch:
    """The watch over the calls of a function.

    Attributes:
        name: local variables → the name of the call for messages.
        end: ends a call in native code, by its local variables; None if that is impossible.
    """

    name: Callable[[Locals], str]
    end: Callable[[Locals], object] | None


_WATCHES: dict[CodeType, _Watch] = {}


def watch_calls(
    name: str | Callable[[Locals], str], end: Callable[[Locals], object] | None = None
) -> Callable[[F], F]:
    """Decorate a function that runs code of the user or a model, and may thus never return.

    Its calls take no more time: a watched thread is looked at from outside.

    Args:
        name: the name of a call for messages, or a function of its local variables.
        end: ends a call in native code, by its local variables; None if that is impossible.
    """

    def watch_function(function: F) -> F:
        named = name if callable(name) else lambda _: name
        _WATCHES[function.__code__] = _Watch(named, end)
        return function

    return watch_function


class _LostThreads:
    """The watched threads whose call could not be ended."""

    count = 0


def count_lost_threads() -> int:
    """Return the number of threads of this process whose call could not be ended."""
    return _LostThreads.count


class WatchedThread:
    """A thread that runs one call at a time; daemonic, so the process does not wait for a call."""

    def __init__(self) -> None:
        self._calls: SimpleQueue[Any] = SimpleQueue()
        self._thread = threading.Thread(
            target=_serve_calls, args=(self._calls,), name="neural_mp calls", daemon=True
        )
        self._thread.start()
        #: The latest call, of which nothing is kept.
        self._latest: Callable[[], futures.Future[Any] | None] = lambda: None

    def __del__(self) -> None:
        """End the thread after its call."""
        self._calls.put(None)

    @property
    def is_current(self) -> bool:
        """Whether this code runs in the thread."""
        return threading.current_thread() is self._thread

    def start_call(self, call: Callable[[], T]) -> futures.Future[T]:
        """Run a call in the context variables and modes of the caller; return its future."""
        future = futures.Future[T]()
        self._latest = weakref.ref(future)
        self._calls.put((future, contextvars.copy_context(), _copy_torch_modes(), call))
        return future

    def find_watched_call(self) -> FrameType | None:
        """Return the frame of the outermost watched call that is running, if any."""
        frames = self._list_watched_frames()
        return frames[-1] if frames else None

    def describe_call(self) -> str:
        """Return the name of the innermost watched call, and the line of the user's within."""
        line = ""
        for frame in self._list_frames():
            file = Path(frame.f_code.co_filename)
            if frame.f_code in _WATCHES:
                name = _WATCHES[frame.f_code].name(frame.f_locals)
                return f"{name} (at {line})" if line else name
            if not line and file.is_file() and not any(map(file.is_relative_to, _LIBRARIES)):
                line = f"{file.name}, line {frame.f_lineno}, in {frame.f_code.co_name}"
        return "a call"

    def end_call(self, seconds: float) -> bool:
        """End the running call, if any, and the thread; return whether both end within seconds.

        Code in Python is ended at its next instruction, a run of a model by its runtime. A call
        that ends in no way goes on, but its result is dropped.
        """
        self._calls.put(None)
        latest = self._latest()
        if latest is None or latest.done():
            return True
        frames = self._list_watched_frames()
        raise_in_thread(self._thread.ident or 0, CallEndedError)
        for frame in frames:
            end = _WATCHES[frame.f_code].end
            if end is not None:
                end(frame.f_locals)
        del frames
        self._thread.join(seconds)
        is_ended = not self._thread.is_alive()
        _LostThreads.count += not is_ended
        return is_ended

    def _list_watched_frames(self) -> list[FrameType]:
        """Return the frames of watched calls, innermost first."""
        return [frame for frame in self._list_frames() if frame.f_code in _WATCHES]

    def _list_frames(self) -> list[FrameType]:
        frame = sys._current_frames().get(self._thread.ident or 0)
        frames = []
        while frame is not None:
            frames.append(frame)
            frame = frame.f_back
        return frames


def _copy_torch_modes() -> AbstractContextManager[None]:
    """Return the context of PyTorch's modes in this thread, to be entered in another one.

    Many scripts switch gradients off once for all their evaluations.
    """
    torch: Any = sys.modules.get("torch")
    if not hasattr(torch, "is_inference_mode_enabled"):  # not imported, or not wholly
        return nullcontext()
    return _set_torch_modes(torch, torch.is_inference_mode_enabled(), torch.is_grad_enabled())


@contextmanager
def _set_torch_modes(torch: Any, inference: bool, grad: bool) -> Iterator[None]:
    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        yield


def _serve_calls(calls: SimpleQueue[Any]) -> None:
    try:
        while (item := calls.get()) is not None:
            future, context, modes, call = item
            try:
                with modes:
                    future.set_result(context.run(call))
            except BaseException as error:  # noqa: BLE001 (raised again by the caller)
                future.set_exception(error)
            # Until the next call, nothing of this one is kept.
            del item, future, context, modes, call
    except CallEndedError:
        return  # raised after the call returned
