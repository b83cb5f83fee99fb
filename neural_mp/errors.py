"""Every error this project raises on purpose, derived from one `NeuralMPError`."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar


class NeuralMPError(Exception):
    """Base of every error raised on purpose: names the thing, what was expected, how to mend it.

    Attributes:
        keys: where in the settings at hand the mistake is, the outermost key first.
    """

    keys: tuple[str | int, ...] = ()


@contextmanager
def error_path(*keys: str | int) -> Iterator[None]:
    """Note in every error of ours raised inside which settings it comes from.

    Raises:
        NeuralMPError: the error raised inside, with these keys before those that it has.
    """
    try:
        yield
    except NeuralMPError as error:
        error.keys = (*keys, *error.keys)
        raise


class ConfigurationError(NeuralMPError):
    """An option, in Python or YAML, that is unknown, has the wrong type or contradicts another."""


class UnknownPrecisionError(ConfigurationError):
    """A precision that does not exist was asked for."""


class UnsupportedPrecisionError(NeuralMPError):
    """A precision this machine does not run was asked for alone."""


class UnknownOperatorError(NeuralMPError):
    """An op or op type that the model does not have was named."""


class UnknownFrameworkError(NeuralMPError):
    """A model of no framework we have an adaptor for."""


class MissingFrameworkError(NeuralMPError):
    """The framework (or an optional package) that a model or option needs is not installed."""


class ModelLoadError(NeuralMPError):
    """A model that cannot be read, or that we refuse to read because doing so would run code."""


class CaptureError(ModelLoadError):
    """A model whose graph cannot be captured."""


class PlanError(NeuralMPError):
    """A precision plan that is malformed or does not fit the model."""


class ConversionError(NeuralMPError):
    """A valid plan that could not be turned into a model."""


class DataError(NeuralMPError):
    """A dataset or dataloader that is missing, empty or of the wrong form."""


class MetricError(NeuralMPError):
    """A metric or evaluation function that is missing, incomplete or returns no usable number."""


class ComparisonError(NeuralMPError):
    """Two models that cannot be compared op by op, such as those of different origin."""


class HistoryError(NeuralMPError):
    """The record of a tuning run cannot be read, or belongs to another run."""


class RunInUseError(HistoryError):
    """A run cannot be gone on with, since another process does so now."""


class KernelLogError(NeuralMPError):
    """A log of kernels that cannot be read or kept, or that holds no kernel."""


class TuningError(NeuralMPError):
    """A tuning run that cannot go on, such as when every plan fails with the same error."""


class TrainingError(NeuralMPError):
    """A training that cannot go on, such as when no step changes the weights any more."""


E = TypeVar("E", bound=BaseException)
#: Characters of an unknown word that are compared with the known ones.
_COMPARED = 200


def mark_user_error(error: E) -> E:
    """Mark an exception as one that the user's own code raised, whichever package it calls.

    One of our own classes is an error of ours, wherever it was raised; a class that is derived from
    one of them is the user's.

    Returns:
        The exception.
    """
    if type(error).__module__.partition(".")[0] != __name__.partition(".")[0]:
        error.__dict__["_neural_mp_users_own"] = True
    return error


def is_users_own(error: BaseException) -> bool:
    """Whether `users_own` marked an exception."""
    return bool(error.__dict__.get("_neural_mp_users_own", False))


def message_of(error: BaseException) -> str:
    """What somebody else's error says; Python's own words where its class raises as it is asked."""
    try:
        return str(error)
    except Exception:  # noqa: BLE001 (whatever it raises, the error itself is what counts)
        return "<exception str() failed>"


def one_line(error: BaseException) -> str:
    """Somebody else's error by its class and the first line of its message."""
    lines = message_of(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def did_you_mean(name: object, known: Iterable[object]) -> str:
    """A clause naming the nearest known word, or the known words where none is near.

    Args:
        name: what was written.
        known: what would have been understood.

    Returns:
        A clause that starts with `; ` and ends without a full stop, or an empty string where
        nothing is known.
    """
    words = sorted({str(word) for word in known})
    # Longer ones take the time of their length squared to compare.
    near = difflib.get_close_matches(str(name)[:_COMPARED], words, n=3, cutoff=0.6)
    if near:
        return "; did you mean " + " or ".join(repr(word) for word in near) + "?"
    if not words:
        return ""
    shown = ", ".join(words[:12]) + (f", … ({len(words)} in all)" if len(words) > 12 else "")
    return f"; known are {shown}"
