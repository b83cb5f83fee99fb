"""Exceptions on their way from one process to another: with what led to them."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FrameType, FunctionType, TracebackType
from typing import Any

logger = logging.getLogger(__name__)

#: A frame of a traceback: file, function, line.
Frame = tuple[str, str, int]


@dataclass(frozen=True)
class CarriedError:
    """An exception as another process can read it.

    Attributes:
        forms: the exception as bytes, those first that tell most.
        words: its class and message, for where none of them can be read.
        notes: what was added to it.
        frames: where it was raised, the outermost first.
        cause: what it was raised from.
        context: what was being handled meanwhile.
        suppressed: whether the context is not to be shown.
    """

    forms: tuple[bytes, ...]
    words: str
    notes: tuple[str, ...]
    frames: tuple[Frame, ...]
    cause: CarriedError | None
    context: CarriedError | None
    suppressed: bool

    def error(self) -> BaseException:
        """The exception; a `RuntimeError` with its words where it cannot be made again."""
        found = _readable(self.forms)
        error = RuntimeError(self.words) if found is None else found
        error.__cause__ = self.cause.error() if self.cause is not None else None
        error.__context__ = self.context.error() if self.context is not None else None
        error.__suppress_context__ = self.suppressed
        if self.notes:
            error.__notes__ = list(self.notes)
        return error.with_traceback(_trace(self.frames))


def carried(error: BaseException) -> CarriedError:
    """An exception as another process can read it."""
    return _carried(error, ())


def _carried(error: BaseException, above: tuple[BaseException, ...]) -> CarriedError:
    def of(other: BaseException | None) -> CarriedError | None:
        known = (*above, error)
        return None if other is None or any(other is e for e in known) else _carried(other, known)

    return CarriedError(
        tuple(_forms(error)),
        f"{type(error).__name__}: {error}",
        tuple(str(note) for note in getattr(error, "__notes__", ())),
        tuple(_frames(error.__traceback__)),
        of(error.__cause__),
        of(error.__context__),
        error.__suppress_context__,
    )


def _forms(error: BaseException) -> list[bytes]:
    """The exception as bytes, in each of the ways in which it can be read again."""
    import cloudpickle

    kept = {name: value for name, value in vars(error).items() if name != "__notes__"}
    ways: tuple[Callable[[], Any], ...] = (
        lambda: error,
        lambda: _Parts(type(error), error.args, kept),
        lambda: _Parts(type(error), error.args, {}),
        lambda: _Parts(type(error), (str(error),), {}),
    )
    found: list[bytes] = []
    for way in ways:
        try:
            form: bytes = cloudpickle.dumps(way())
        except Exception:
            # Whatever the user's own exception raises when it is to be copied.
            logger.debug("an exception cannot be copied to another process", exc_info=True)
            continue
        copy = _readable([form])
        if type(copy) is type(error) and str(copy) == str(error):
            found.append(form)
    return found[:1]


@dataclass(frozen=True)
class _Parts:
    """An exception whose class cannot be called with the arguments that it keeps."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def error(self) -> BaseException:
        built_in = next(kind for kind in self.kind.__mro__ if kind.__module__ == "builtins")
        made: BaseException = built_in.__new__(self.kind, *self.args)
        vars(made).update(self.attributes)
        return made


def _readable(forms: Sequence[bytes]) -> BaseException | None:
    """The exception that is in the first of the forms that can be read."""
    import cloudpickle

    for form in forms:
        try:
            found = cloudpickle.loads(form)
            error = found.error() if isinstance(found, _Parts) else found
            str(error)
        except Exception:
            # Whatever the user's own class raises when it is called with what it keeps.
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
    """A traceback with these frames, which hold nothing but their places."""
    trace: TracebackType | None = None
    for filename, name, line in reversed(frames):
        code = _stand_in.__code__.replace(
            co_filename=filename, co_name=name, co_firstlineno=max(line, 1)
        )
        if sys.version_info >= (3, 11):  # tracebacks of later ones show it
            code = code.replace(co_qualname=name)
        frame: FrameType = FunctionType(code, {"sys": sys})()
        trace = TracebackType(trace, frame, -1, line)
    return trace


def _stand_in() -> FrameType:
    return sys._getframe()
