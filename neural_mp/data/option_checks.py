"""Checks on option values as they come from YAML, and on packages that they need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError, did_you_mean
from neural_mp.io.files import check_ends
from neural_mp.util.argument_checks import SEEDS, brief, path_of

_LARGEST = 1e300


def whole_number(option: str, value: Any, minimum: int | None = None) -> int:
    """`value` as an int, from `minimum` on."""
    fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits or (minimum is not None and value < minimum):
        bound = "" if minimum is None else f" from {minimum}"
        raise ConfigurationError(f"{option} must be a whole number{bound}, got {brief(value)}")
    if abs(value) > SEEDS[-1]:
        raise ConfigurationError(f"{option} can be {SEEDS[-1]} at most, got {brief(value)}")
    return int(value)


def whole_numbers(option: str, value: Any, minimum: int | None = None) -> tuple[int, ...]:
    """A list of whole numbers, each from `minimum` on, as a tuple."""
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ConfigurationError(f"{option} must be a list of whole numbers, got {value!r}")
    return tuple(whole_number(f"each of {option}", item, minimum) for item in value)


def finite_number(option: str, value: Any) -> float:
    """`value` as a finite float."""
    fits = isinstance(value, Real) and not isinstance(value, bool)
    if not fits or not abs(value) < _LARGEST:  # beyond, whole numbers have no float
        raise ConfigurationError(f"{option} must be a number, got {brief(value)}")
    return float(value)


def finite_numbers(option: str, value: Any) -> tuple[float, ...]:
    """One number or a list of numbers, as a tuple of at least one."""
    if isinstance(value, Sequence) and not isinstance(value, str) and value:
        return tuple(finite_number(f"each of {option}", item) for item in value)
    return (finite_number(option, value),)


def true_or_false(option: str, value: Any) -> bool:
    """`value`, which must be a bool."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{option} must be true or false, got {value!r}")
    return value


def one_of(option: str, value: Any, choices: Sequence[str]) -> str:
    """`value`, which must be one of `choices`."""
    if value not in choices:
        raise ConfigurationError(
            f"{option} must be {' or '.join(map(repr, choices))}, got {value!r}"
            f"{did_you_mean(value, choices) if isinstance(value, str) else ''}"
        )
    return str(value)


def height_and_width(option: str, value: Any) -> tuple[int, int]:
    """`[height, width]` in pixels; one number stands for both."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        sizes = whole_numbers(option, value, minimum=1)
    else:
        sizes = (whole_number(option, value, minimum=1),) * 2
    if len(sizes) != 2:
        raise ConfigurationError(f"{option} must be one number or [height, width], got {value!r}")
    return sizes[0], sizes[1]


def numeric_dtype(option: str, value: Any) -> np.dtype[Any]:
    """The numpy dtype of integers or floats that `value` names."""
    try:
        dtype = np.dtype(value) if value is not None else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "iuf":
        raise ConfigurationError(
            f"{option} must name a numpy dtype of integers or floats, "
            f"such as float32 or int64, got {value!r}"
        )
    return dtype


def existing_path(option: str, value: Any) -> Path:
    """The path `value`, relative to the current directory, which must exist.

    Raises:
        ConfigurationError: it is no path.
        DataError: nothing is there, or neither a file nor a folder.
    """
    if not isinstance(value, str | Path) or not str(value):
        raise ConfigurationError(f"{option} must be a path, got {brief(value)}")
    path = path_of(option, value).expanduser()
    if not path.exists():
        raise DataError(f"{option}: there is nothing at {path} (looked from {Path.cwd()})")
    try:
        check_ends(path)
    except OSError as error:
        raise DataError(f"{option}: {path} cannot be read: {error.strerror}") from None
    return path


def existing_folder(option: str, value: Any) -> Path:
    """The folder `value`, which must exist.

    Raises:
        ConfigurationError: it is no path.
        DataError: nothing, or a file, is there.
    """
    path = existing_path(option, value)
    if not path.is_dir():
        raise DataError(f"{option} must be a folder; {path} is a file")
    return path


def existing_file(option: str, value: Any) -> Path:
    """The file `value`, which must exist.

    Raises:
        ConfigurationError: it is no path.
        DataError: nothing, or a folder, is there.
    """
    path = existing_path(option, value)
    if path.is_dir():
        raise DataError(f"{option} must be a file; {path} is a folder")
    return path


def package(name: str, needed_by: str, extra: str, called: str | None = None) -> Any:
    """The module `name`, imported.

    Args:
        name: of the module.
        needed_by: what needs it, for the message.
        extra: which of our extras brings it.
        called: what it is called in the message; `name` where left out.

    Raises:
        MissingFrameworkError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingFrameworkError(
            f"{needed_by} needs {called or name}; install it with: pip install 'neural-mp[{extra}]'"
        ) from error
