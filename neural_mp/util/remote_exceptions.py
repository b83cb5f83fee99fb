"""Picklable exceptions, including their causes, for transfer between processes."""

from __future__ import annotations

import builtins
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from traceback import walk_tb
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
        pickled: the most detailed variant that can be unpickled; None if there is none.
        words: class and message, used if unpickling fails.
        notes: notes added to the exception.
        frames: traceback, outermost frame first.
        members: members of an exception group.
        cause: explicit cause.
        context: exception handled at the time of raising.
        suppressed: whether the context is hidden.
    """

    pickled: bytes | None
    words: str
    notes: tuple[str, ...]
    frames: tuple[Frame, ...]
    members: tuple[int, ...]
    cause: int | None
    context: int | None
    suppressed: bool

    def rebuild_exception(self, members: Sequence[BaseException]) -> BaseException:
        """Rebuild the exception, without cause and context."""
        restored = None if self.pickled is None else _unpickle_original_error(self.pickled, members)
        error = RuntimeError(self.words) if restored is None else restored
        if self.notes:
            error.__notes__ = list(self.notes)
        return error.with_traceback(_build_traceback(self.frames))


@dataclass(frozen=True)
class RemoteException:
    """A picklable exception with its causes and contexts.

    Each exception is stored once: causes may be shared, and chains may be long.

    Attributes:
        nodes: the exceptions; the raised one first.
    """

    nodes: tuple[_ExceptionNode, ...]

    def rebuild_exception(self) -> BaseException:
        """Rebuild the exception; a `RuntimeError` with its message if rebuilding fails."""

        @cache
        def load_node(index: int) -> BaseException:
            node = self.nodes[index]
            return node.rebuild_exception([load_node(member) for member in node.members])

        for index, node in enumerate(self.nodes):
            error = load_node(index)
            error.__cause__ = None if node.cause is None else load_node(node.cause)
            error.__context__ = None if node.context is None else load_node(node.context)
            error.__suppress_context__ = node.suppressed
        return load_node(0)


def dump_exception(error: BaseException) -> RemoteException:
    """Convert an exception to a picklable form."""
    errors, indices = [error], {id(error): 0}

    def index_exception(exception: BaseException | None) -> int | None:
        if exception is None:
            return None
        if id(exception) not in indices:
            indices[id(exception)] = len(errors)
            errors.append(exception)
        return indices[id(exception)]

    nodes = []
    for current in errors:  # grows during iteration
        members = [index_exception(member) for member in _group_members(current)]
        nodes.append(
            _ExceptionNode(
                _pickle_restorable_error(current),
                f"{type(current).__name__}: {message_of(current)}",
                tuple(str(note) for note in getattr(current, "__notes__", ())),
                tuple(
                    (
                        frame.f_code.co_filename,
                        frame.f_code.co_name,
                        line or frame.f_code.co_firstlineno,
                    )
                    for frame, line in walk_tb(current.__traceback__)
                ),
                tuple(member for member in members if member is not None),
                index_exception(current.__cause__),
                index_exception(current.__context__),
                current.__suppress_context__,
            )
        )
    return RemoteException(tuple(nodes))


def _group_members(error: BaseException) -> tuple[BaseException, ...]:
    if sys.version_info >= (3, 11) and isinstance(error, builtins.BaseExceptionGroup):
        return error.exceptions
    return ()


def _pickle_restorable_error(error: BaseException) -> bytes | None:
    """Return the first pickled variant that can be read back; None if there is none."""
    import cloudpickle

    members = _group_members(error)
    args = error.args[:1] if members else error.args
    attributes = {name: value for name, value in vars(error).items() if name != "__notes__"}
    variants: tuple[Callable[[], Any], ...] = (
        lambda: _Rebuilder(type(error), args, attributes) if members else error,
        lambda: _Rebuilder(type(error), args, attributes),
        lambda: _Rebuilder(type(error), args, {}),
        lambda: _Rebuilder(type(error), (message_of(error),), {}),
    )
    for variant in variants:
        try:
            pickled: bytes = cloudpickle.dumps(variant())
        except Exception:
            # Pickling a user-defined exception may raise anything.
            logger.debug("an exception cannot be pickled", exc_info=True)
            continue
        copy = _unpickle_original_error(pickled, members)
        if type(copy) is type(error) and message_of(copy) == message_of(error):
            return pickled
    return None


@dataclass(frozen=True)
class _Rebuilder:
    """Exception whose class cannot be called with the stored arguments."""

    kind: type[BaseException]
    args: tuple[Any, ...]
    attributes: dict[str, Any]

    def rebuild_exception(self, members: Sequence[BaseException]) -> BaseException:
        built_in = next(kind for kind in self.kind.__mro__ if kind.__module__ == "builtins")
        args = (*self.args, list(members)) if members else self.args
        exception: BaseException = built_in.__new__(self.kind, *args)
        vars(exception).update(self.attributes)
        return exception


def _unpickle_original_error(
    pickled: bytes, members: Sequence[BaseException]
) -> BaseException | None:
    import cloudpickle

    try:
        payload = cloudpickle.loads(pickled)
        error = payload.rebuild_exception(members) if isinstance(payload, _Rebuilder) else payload
    except Exception:
        # The constructor of a user-defined class may raise anything.
        logger.debug("an exception cannot be unpickled", exc_info=True)
        return None
    return error if isinstance(error, BaseException) else None


def _build_traceback(frames: Sequence[Frame]) -> TracebackType | None:
    """Return a traceback of frames that only have locations."""
    trace: TracebackType | None = None
    for filename, name, line in reversed(frames):
        stand_in = (lambda: sys._getframe()).__code__
        code = stand_in.replace(co_filename=filename, co_name=name, co_firstlineno=max(line, 1))
        if sys.version_info >= (3, 11):  # shown in tracebacks since 3.11
            code = code.replace(co_qualname=name)
        frame: FrameType = FunctionType(code, {"sys": sys})()
        trace = TracebackType(trace, frame, -1, line)
    return trace
