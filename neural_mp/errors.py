"""Exceptions of this package, all derived from `NeuralMPError`, and helpers for messages."""

from __future__ import annotations

import difflib
import pickle
import re
import signal
import sys
import threading
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from traceback import walk_tb
from types import CodeType
from typing import TypeVar


def visible(text: str) -> str:
    """Return a text with control characters escaped.

    These include characters that change the text direction (Unicode Standard Annex #9), so that a
    name can neither hide nor reorder text.
    """
    if text.isprintable():
        return text
    return "".join(
        f"\\u{ord(letter):04x}"
        if unicodedata.category(letter) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp")
        and letter not in "\n\t"
        else letter
        for letter in text
    )


#: Passwords of URLs: between user and host, up to the last `@`, and as a parameter.
_PASSWORDS = (
    re.compile(r"(?<=://)([^\s:/@'\"]*):[^\s'\"]*@"),
    re.compile(r"(?<=[?&])(\w*(?:password|passwd|pwd|token))=[^\s&'\"]*", re.IGNORECASE),
)
_MASKS = (r"\1:***@", r"\1=***")


def without_passwords(text: str) -> str:
    """Return a text with the passwords of its URLs masked."""
    for pattern, mask in zip(_PASSWORDS, _MASKS, strict=True):
        text = pattern.sub(mask, text)
    return text


class NeuralMPError(Exception):
    """Base of all deliberate errors: the message names the subject, the rule and the fix.

    The message may contain names from files and URLs of storages, so that `str` escapes control
    characters and masks passwords.

    Attributes:
        keys: path of the mistake in the settings, outermost key first.
    """

    keys: tuple[str | int, ...] = ()

    def __init__(self, *arguments: object) -> None:
        """Initialize the error.

        Raises:
            BaseException: the exception of a signal handler of the user's, if the error would wrap
                it: a timeout that interrupts a framework is no failure of the framework.
        """
        super().__init__(*arguments)
        interruption = _exception_of_handler()
        if interruption is not None:
            raise mark_user_error(interruption)

    def __str__(self) -> str:
        return visible(without_passwords(super().__str__()))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({str(self)!r})"


def _exception_of_handler() -> BaseException | None:
    """Return the exception being handled, or a cause of it, that a signal handler raised."""
    error = sys.exc_info()[1]
    if error is None or threading.current_thread() is not threading.main_thread():
        return None
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    codes = {code for handler in handlers if (code := _code_of(handler)) is not None}
    causes: list[BaseException] = []
    while codes and error is not None and error not in causes:
        causes.append(error)
        if any(frame.f_code in codes for frame, _ in walk_tb(error.__traceback__)):
            return error
        error = error.__cause__ or error.__context__
    return None


def _code_of(handler: object) -> CodeType | None:
    """Return the code of a Python function, method, partial or callable object; None for others."""
    while isinstance(handler, partial):
        handler = handler.func
    if not callable(handler):
        return None
    function = getattr(handler, "__func__", handler)
    if not hasattr(function, "__code__"):
        function = type(handler).__call__
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


@contextmanager
def error_path(*keys: str | int) -> Iterator[None]:
    """Prepend keys to the path of every `NeuralMPError` raised in this context."""
    try:
        yield
    except NeuralMPError as error:
        error.keys = (*keys, *error.keys)
        raise


def make_pickling_error(model: str) -> pickle.PicklingError:
    """Return the error for pickling, which serializers of other packages pass on as it is."""
    return pickle.PicklingError(
        f"{model} cannot be pickled, as its kernels hold packed weights or a session; use "
        f"result.save(folder), and neural_mp.load(folder) in the other process"
    )


class ConfigurationError(NeuralMPError):
    """An option, in Python or YAML, that is unknown, has the wrong type or contradicts another."""


class ArgumentValueError(ConfigurationError, ValueError):
    """A wrong value for a function that stands for one of TensorFlow, which raises ValueError."""


class ArgumentTypeError(ConfigurationError, TypeError):
    """A wrong type for a function that stands for one of TensorFlow, which raises TypeError."""


class UnknownPrecisionError(ConfigurationError):
    """A requested precision does not exist."""


class UnsupportedPrecisionError(NeuralMPError):
    """No requested precision besides FP32 is supported on this machine."""


class UnknownOperatorError(NeuralMPError):
    """An op or op type that does not exist in the model."""


class UnknownFrameworkError(NeuralMPError):
    """A model of a framework without an adaptor."""


class MissingFrameworkError(NeuralMPError):
    """The framework (or an optional package) that a model or option needs is not installed."""


class ModelLoadError(NeuralMPError):
    """A model that cannot be read, or is refused because reading would execute code."""


class CaptureError(ModelLoadError):
    """A model whose graph cannot be captured."""


class PlanError(NeuralMPError):
    """A precision plan that is malformed or does not fit the model."""


class ConversionError(NeuralMPError):
    """A valid plan that could not be turned into a model."""


class ForkError(NeuralMPError):
    """A runtime that is used in a forked child after its parent has used the same runtime."""


class DataError(NeuralMPError):
    """A dataset or data loader that is missing, empty or malformed."""


class MetricError(NeuralMPError):
    """A metric or evaluation function that is missing, incomplete or returns no usable number."""


class ComparisonError(NeuralMPError):
    """Two models that cannot be compared op by op, e.g. of different origin."""


class HistoryError(NeuralMPError):
    """The record of a tuning run cannot be read, or belongs to another run."""


class RunInUseError(HistoryError):
    """A run cannot be resumed, because another process owns its lease."""


class KernelLogError(NeuralMPError):
    """A kernel log that cannot be read or written, or that contains no kernel."""


class TuningError(NeuralMPError):
    """A tuning run that cannot continue, e.g. because every plan fails with one error."""


class TrainingError(NeuralMPError):
    """A training run that cannot continue, e.g. because no step updates the weights."""


E = TypeVar("E", bound=BaseException)
#: Maximum characters of an unknown word compared with the known words.
_MAX_COMPARED_CHARS = 200


def mark_user_error(error: E) -> E:
    """Mark an exception as raised by the user's own code, whichever package the code calls.

    Classes of this package are never marked; a user's subclass of such a class is. Return the
    exception.
    """
    if type(error).__module__.partition(".")[0] != __name__.partition(".")[0]:
        error.__dict__["_neural_mp_users_own"] = True
    return error


def is_users_own(error: BaseException) -> bool:
    """Whether `mark_user_error` marked an exception."""
    return bool(error.__dict__.get("_neural_mp_users_own", False))


def message_of(error: BaseException) -> str:
    """Return the message of an exception without passwords, or a placeholder if `str()` raises."""
    try:
        return without_passwords(str(error))
    except Exception:  # noqa: BLE001 (a `__str__` of the user's may raise anything)
        return "<exception str() failed>"


def one_line(error: BaseException) -> str:
    """Return the class of an exception and the first line of its message, as `visible`."""
    lines = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {visible(lines[0])}" if lines else type(error).__name__


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """Return a clause with the known words closest to an unknown one, or with all if none is close.

    It starts with `; ` and ends without a full stop; it is empty if `known` is empty.
    """
    names = sorted({str(choice) for choice in known})
    # The comparison is quadratic in the length of the words.
    text = str(name)[:_MAX_COMPARED_CHARS]
    # A prefix up to a separator is closer than a word of similar letters: arm → arm-dotprod.
    begun = [choice for choice in names if text and re.match(rf"{re.escape(text)}[-_.:]", choice)]
    matches = begun[:3] or difflib.get_close_matches(text, names, n=3, cutoff=0.6)
    if matches:
        return "; did you mean " + " or ".join(repr(choice) for choice in matches) + "?"
    if not names:
        return ""
    shown = ", ".join(names[:12]) + (f", … ({len(names)} in all)" if len(names) > 12 else "")
    return f"; known are {shown}"
