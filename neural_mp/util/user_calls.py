"""Calls of user-supplied code.

Distinguishes calls that do not match the user's signature from exceptions raised by the user's
code. The former become errors of this package; the latter pass unchanged.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from pathlib import Path
from traceback import walk_tb
from types import TracebackType
from typing import Any, Literal

from neural_mp.errors import NeuralMPError, mark_user_error, message_of
from neural_mp.util.system.watched_thread import CallEndedError, Locals, watch_calls

_PACKAGE = Path(__file__).resolve().parent.parent


class UserCodeError(Exception):
    """Wraps an exception of the user's code internally; never reaches the user.

    The wrapper keeps `except` clauses for errors of this package or a framework from matching.

    Args:
        error: the user's exception.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {message_of(error)}")
        self.error = unwrap_generator_error(error)
        self.__cause__ = self.error


class ReraiseUserErrors(ContextDecorator):
    """Unwraps exceptions of the user's code and raises the original object."""

    def __enter__(self) -> None:
        """Enter the context."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Raise the exception wrapped in a `UserCodeError`.

        Raises:
            BaseException: the wrapped exception.
        """
        if not isinstance(failure, UserCodeError):
            return False
        error = mark_user_error(failure.error)
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # drop the wrapper from its context


def _name_call(local: Locals) -> str:
    call = local["call"]
    return str(local["form"] or getattr(call, "__qualname__", type(call).__name__))


@watch_calls(_name_call)
def call_user(
    call: Callable[..., Any],
    *arguments: object,
    form: str = "",
    kind: type[NeuralMPError] = NeuralMPError,
) -> Any:
    """Call the user's code and return its result.

    Args:
        call: the user's function or method.
        arguments: positional arguments.
        form: the call as text, e.g. `eval_func(model)`; if empty, a signature mismatch counts as an
            exception of the user's code.
        kind: class of the error on a mismatch.

    Raises:
        UserCodeError: `call` raised, or code of this package called by `call`.
        NeuralMPError: of class `kind`, if the signature does not match.
        KeyboardInterrupt: interrupted by the user.
    """
    try:
        return call(*arguments)
    except (UserCodeError, KeyboardInterrupt, CallEndedError):
        raise
    except BaseException as error:
        if form and is_signature_mismatch(error, call, *arguments):
            raise kind(make_mismatch_message(error, call, form)) from error
        raise UserCodeError(error) from error


def is_signature_mismatch(
    error: BaseException, call: Callable[..., Any], *arguments: object
) -> bool:
    """Whether an error caught at a call means that the function does not accept the arguments."""
    if not isinstance(error, TypeError):
        return False
    if error.__traceback__ is None or error.__traceback__.tb_next is None:
        return True  # raised before the function's first line
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError:
        return True
    except ValueError:  # some C functions have no signature
        return False
    return False


def make_mismatch_message(error: BaseException, call: Callable[..., Any], form: str) -> str:
    """Return the message for a signature mismatch."""
    try:
        signature = inspect.signature(call)
        plain = [p.replace(annotation=p.empty) for p in signature.parameters.values()]
        takes = f"takes {signature.replace(parameters=plain, return_annotation=signature.empty)}"
    except (TypeError, ValueError):
        takes = "takes other arguments"
    return f"the call {form} must match the function, which {takes}: {error}"


def unwrap_generator_error(error: BaseException) -> BaseException:
    """Return the exception that a generator of this package converted.

    Python converts a `StopIteration` that leaves a generator to `RuntimeError`.
    """
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        frames = [frame for frame, _ in walk_tb(error.__traceback__)]
        if not frames or not Path(frames[-1].f_code.co_filename).is_relative_to(_PACKAGE):
            break
        error = error.__cause__
    return error
