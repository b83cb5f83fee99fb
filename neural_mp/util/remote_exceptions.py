"""Picklable exceptions, including their causes, for transfer between processes."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType
from typing import Any

from neural_mp.errors import message_of

logger = logging.getLogger(__name__)

#: A frame of a traceback: file, function, line.
Frame = tuple[str, str, int]


@dataclass(frozen=True)
class _ExceptionNode:
    """One exception of a chain; refers to others by index.

    Attributes:
        forms: pickled variants, most detailed first.
        words: class and message, used if no variant can be unpickled.
        notes: notes added to the exception.
        frames: traceback, outermost frame first.
        members: members of an exception group.
        cause: explicit cause.
        context: exception handled at the time of raising.
        suppressed: whether the context is hidden.
    """

    forms: tuple[bytes, ...]
    words: str
    notes: tuple[str, ...]
    frames: tuple[Frame, ...]
    members: tuple[int, ...]
    cause: int | None
    context: int | None
    suppressed: bool

    def load(self, members: Sequence[BaseException]) -> BaseException:
        """Rebuild the exception, without cause and context."""
        found = _readable(self.forms, members)
        error = RuntimeError(self.words) if found is None else found
        if self.notes:
            error.__notes__ = list(self.notes)
        return error.with_traceback(_trace(self.frames))


@dataclass(frozen=True)
class RemoteException:
    """A picklable exception with its causes and contexts.

    Each exception is stored once: causes may be shared, and chains may be long.

    Attributes:
        parts: the exceptions; the raised one first.
    """

    parts: tuple[_ExceptionNode, ...]

    def load(self) -> BaseException:
        """Rebuild the exception; a `RuntimeError` with its message if rebuilding fails."""
        made: dict[int, BaseException] = {}

        def make(place: int) -> BaseException:
            if place not in made:
                part = self.parts[place]
                made[place] = part.load([make(member) for member in part.members])
            return made[place]

        for place, part in enumerate(self.parts):
            error = make(place)
            error.__cause__ = None if part.cause is None else make(part.cause)
            error.__context__ = None if part.context is None else make(part.context)
            error.__suppress_context__ = part.suppressed
        return made[0]


def dump_exception(error: BaseException) -> RemoteException:
    """Convert an exception to a picklable form."""
    errors, places = [error], {id(error): 0}

    def place_of(other: BaseException | None) -> int | None:
        if other is None:
            return None
        if id(other) not in places:
            places[id(other)] = len(errors)
            errors.append(other)
        return places[id(other)]

    parts = []
    for one in errors:  # grows during iteration
        members = [place_of(member) for member in _members(one)]
        parts.append(
            _ExceptionNode(
                tuple(_forms(one)),
                f"{type(one).__name__}: {message_of(one)}",
                tuple(str(note) for note in getattr(one, "__notes__", ())),
                tuple(_frames(one.__traceback__)),
                tuple(member for member in members if member is not None),
                place_of(one.__cause__),
                place_of(one.__context__),
                one.__suppress_context__,
            )
        )
    return RemoteException(tuple(parts))


def _members(error: BaseException) -> tuple[BaseException, ...]:
    """Return the members of an exception group."""
    if sys.version_info >= (3, 11) and isinstance(error, builtins.BaseExceptionGroup):
        return error.exceptions
    return ()


def _forms(error: BaseException) -> list[bytes]:
    """Return the first pickled variant that can be read back."""
    import cloudpickle

    members = _members(error)
    args = error.args[:1] if members else error.args
    kept = {name: value for name, value in vars(error).items() if name != "__notes__"}
    ways: tuple[Callable[[], Any], ...] = (
        lambda: _Rebuilder(type(error), args, kept) if members else error,
        lambda: _Rebuilder(type(error), args, kept),
        lambda: _Rebuilder(type(error), args, {}),
        lambda: _Rebuilder(type(error), (message_of(error),), {}),
    )
    found: list[bytes] = []
    for way in ways:
        try:
            form: bytes = cloudpickle.dumps(way())
        except Exception:
            # Pickling a user-defined exception may raise anything.
            logger.debug("an exception cannot be copied to another process", exc_info=True)
            continue
        copy = _readable([form], members)
        if type(copy) is type(error) and message_of(copy) == message_of(error):
            found.append(form)
    return found[:1]


@dataclass(frozen=True)
class _Rebuilder:
    """Exception whose class cannot be called with the stored arguments."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def load(self, members: Sequence[BaseException]) -> BaseException:
        built_in = next(kind for kind in self.kind.__mro__ if kind.__module__ == "builtins")
        args = (*self.args, list(members)) if members else self.args
        made: BaseException = built_in.__new__(self.kind, *args)
        vars(made).update(self.attributes)
        return made


def _readable(forms: Sequence[bytes], members: Sequence[BaseException]) -> BaseException | None:
    """Return the exception from the first readable variant."""
    import cloudpickle

    for form in forms:
        try:
            found = cloudpickle.loads(form)
            error = found.load(members) if isinstance(found, _Rebuilder) else found
        except Exception:
            # The constructor of a user-defined class may raise anything.
            logger.debug("an exception cannot be read", exc_info=True)
            continue
        if isinstance(error, BaseException):
            return error
    return None


def _frames(trace: TracebackType | None) -> list[Frame]:
    found: list[Frame] = []
    while trace is not None:
        code = trace.tb_frame.f_code
        found.append((code.co_filename, code.co_name, trace.tb_lineno or code.co_firstlineno))
        trace = trace.tb_next
    return found


def _trace(frames: Sequence[Frame]) -> TracebackType | None:
    """Return a traceback of frames that only have locations."""
    trace: TracebackType | None = None
    for filename, name, line in reversed(frames):
        code = _stand_in.__code__.replace(
            co_filename=filename, co_name=name, co_firstlineno=max(line, 1)
        )
        if sys.version_info >= (3, 11):  # shown in tracebacks since 3.11
            code = code.replace(co_qualname=name)
        frame: FrameType = FunctionType(code, {"sys": sys})()
        trace = TracebackType(trace, frame, -1, line)
    return trace


def _stand_in() -> FrameType:
    return sys._getframe()
