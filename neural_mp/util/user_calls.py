"""The gate through which what users hand over is called.

It tells a call of ours that does not fit what was given from an exception that the user's own code
raised. The former is an error of ours; the latter comes through as it is, whatever its class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ContextDecorator
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from neural_mp.errors import NeuralMPError, mark_user_error, message_of

_PACKAGE = Path(__file__).resolve().parent.parent


class UserCodeError(Exception):
    """What users handed over raised; never seen by them.

    No `except` for errors of ours, or for those of a framework, takes it for one of these.

    Args:
        error: what was raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(f"{type(error).__name__}: {message_of(error)}")
        self.error = as_raised(error)
        self.__cause__ = self.error


class ReraiseUserErrors(ContextDecorator):
    """Let what the user's own code raised come out as that very object."""

    def __enter__(self) -> None:
        """Begin."""

    def __exit__(
        self,
        kind: type[BaseException] | None,
        failure: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        """Raise what a `UserCodeError` carries.

        Raises:
            BaseException: what was carried.
        """
        if not isinstance(failure, UserCodeError):
            return False
        error = mark_user_error(failure.error)
        context = error.__context__
        try:
            raise error
        finally:
            error.__context__ = context  # it was raised before there was a failure of ours


def call_user(
    call: Callable[..., Any],
    *arguments: object,
    form: str = "",
    kind: type[NeuralMPError] = NeuralMPError,
) -> Any:
    """What the user's own code gives.

    Args:
        call: the user's function or method.
        arguments: what it is given.
        form: how we call it, for the message where it takes something else; such as
            `eval_func(model)`.
        kind: of that error.

    Raises:
        UserCodeError: it raised, or a part of ours that it goes through did.
        NeuralMPError: it does not take what it is given; of the class `kind`.
        KeyboardInterrupt: the user interrupted it.
    """
    try:
        return call(*arguments)
    except (UserCodeError, KeyboardInterrupt):
        raise
    except BaseException as error:
        if form and is_signature_mismatch(error, call, *arguments):
            raise kind(misfit_words(error, call, form)) from error
        raise UserCodeError(error) from error


def is_signature_mismatch(
    error: BaseException, call: Callable[..., Any], *arguments: object
) -> bool:
    """Whether an error says that a function does not take what it was given.

    Args:
        error: what the call raised, caught where the call was made.
        call: the function.
        arguments: what it was given.
    """
    if not isinstance(error, TypeError):
        return False
    if error.__traceback__ is None or error.__traceback__.tb_next is None:
        return True  # it was raised before a line of the function ran
    try:
        inspect.signature(call).bind(*arguments)
    except TypeError:
        return True
    except ValueError:  # some written in C do not tell their signature
        return False
    return False


def misfit_words(error: BaseException, call: Callable[..., Any], form: str) -> str:
    """What to say of a function that does not take what it was given."""
    try:
        found = inspect.signature(call)
        plain = [p.replace(annotation=p.empty) for p in found.parameters.values()]
        takes = f"takes {found.replace(parameters=plain, return_annotation=found.empty)}"
    except (TypeError, ValueError):
        takes = "takes something else"
    return f"it is called as {form}, but what was given {takes}: {error}"


def as_raised(error: BaseException) -> BaseException:
    """An exception as it was before a generator of ours made another of it.

    `StopIteration` cannot leave a generator; Python raises a `RuntimeError` in its place.
    """
    while isinstance(error, RuntimeError) and isinstance(error.__cause__, StopIteration):
        trace = error.__traceback__
        while trace is not None and trace.tb_next is not None:
            trace = trace.tb_next
        if trace is None or not _is_ours(trace.tb_frame.f_code.co_filename):
            break
        error = error.__cause__
    return error


def _is_ours(filename: str) -> bool:
    return Path(filename).is_relative_to(_PACKAGE)
