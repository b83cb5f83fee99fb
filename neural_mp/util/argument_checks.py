"""What users give, within bounds: numbers that a library below can hold, and paths that exist."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from neural_mp.errors import ConfigurationError

#: What may seed random numbers: numpy's old generators, which Optuna uses, take 32 bits.
SEEDS = range(1 << 32)
#: The most of whatever is counted in an option.
MOST = (1 << 31) - 1
#: The most seconds of a limit of time, 31 years: waiting functions refuse more than centuries.
MOST_SECONDS = 10**9
#: The most bytes of an array that an option gives the sizes of.
_MOST_BYTES = 1 << 32
#: Bytes of a path, and of a name in it, of common file systems.
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
_SHOWN = 80


def brief(value: Any) -> str:
    """A value in a message, cut short."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return f"a number of {value.bit_length()} bits"
    words = repr(value)
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"


def check_text(option: str, value: Any) -> None:
    """Refuse a text or path that holds the character NUL, which no file, module or URL has.

    Raises:
        ConfigurationError: it holds one.
    """
    if isinstance(value, str | Path) and "\0" in str(value):
        raise ConfigurationError(f"{option} holds the character NUL: {brief(str(value))}")


def check_path(option: str, value: Any) -> None:
    """Refuse a text or path that no file can be called.

    Raises:
        ConfigurationError: it holds NUL, or what has no bytes, or is too long.
    """
    if not isinstance(value, str | Path):
        return
    check_text(option, value)
    try:
        names = os.fsencode(value).split(os.fsencode(os.sep))
    except UnicodeEncodeError as error:
        raise ConfigurationError(f"{option} is no path: {error.reason}") from None
    if len(os.fsencode(value)) > _LONGEST_PATH or max(map(len, names)) > _LONGEST_NAME:
        raise ConfigurationError(f"{option} is longer than a path can be: {brief(str(value))}")


def path_of(option: str, value: Any) -> Path:
    """A path that a user gives.

    Raises:
        ConfigurationError: it is no path, or none that a file can have.
    """
    if not isinstance(value, str | Path):
        raise ConfigurationError(f"{option} must be a path, got {brief(value)}")
    check_path(option, value)
    return Path(value)


def check_seed(option: str, value: int) -> None:
    """Refuse what cannot seed random numbers.

    Raises:
        ConfigurationError: it is out of range.
    """
    if value not in SEEDS:
        raise ConfigurationError(
            f"{option} must be a whole number from 0 to {SEEDS[-1]}, got {brief(value)}"
        )


def check_count(option: str, value: int, least: int = 1) -> None:
    """Refuse a number of things that is out of range.

    Raises:
        ConfigurationError: it is.
    """
    if not least <= value <= MOST:
        raise ConfigurationError(
            f"{option} must be a whole number from {least} to {MOST}, got {brief(value)}"
        )


def check_size(option: str, shape: tuple[int, ...], itemsize: int) -> None:
    """Refuse the sizes of an array that would fill the memory.

    Raises:
        ConfigurationError: it has more than 4 GiB.
    """
    if math.prod(shape) * itemsize > _MOST_BYTES:
        raise ConfigurationError(
            f"{option}: an array of {brief(shape)} would take more than {_MOST_BYTES >> 30} GiB"
        )
