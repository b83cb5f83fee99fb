"""Validators of option values from YAML, and imports of packages that options need."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from neural_mp.errors import ConfigurationError, DataError, MissingFrameworkError
from neural_mp.io.files import find_working_directory, require_regular_file
from neural_mp.util import validators
from neural_mp.util.optional_packages import install_command
from neural_mp.util.system.memory import describe_shortage
from neural_mp.util.validators import MAX_SEED, validate_option


def true_or_false(option: str, value: object) -> bool:
    """Return `value`, which must be a bool."""
    return validate_option(option, validators.boolean, value)


def check_whole_number(option: str, value: object, minimum: int = -MAX_SEED) -> int:
    """Return `value` as an int, at least `minimum`."""
    return validate_option(option, validators.integer_between(minimum, MAX_SEED), value)


def check_whole_numbers(option: str, value: object, minimum: int = -MAX_SEED) -> tuple[int, ...]:
    """Return a list of whole numbers, each at least `minimum`, as a tuple."""
    validator = validators.integer_between(minimum, MAX_SEED)
    return validate_option(option, validators.list_of(validator, "a list of whole numbers"), value)


def check_finite_number(option: str, value: object) -> float:
    """Return `value` as a finite float."""
    return validate_option(option, validators.finite, value)


def check_finite_numbers(option: str, value: Any) -> tuple[float, ...]:
    """Return one number or a non-empty list of numbers as a tuple."""
    if validators.is_list(value) and len(value):
        return validate_option(option, validators.list_of(validators.finite), value)
    return (check_finite_number(option, value),)


def check_one_of(option: str, value: object, choices: Sequence[str]) -> str:
    """Return `value`, which must be one of `choices`."""
    validator = validators.one_of(choices, " or ".join(map(repr, choices)))
    return validate_option(option, validator, value)


def height_and_width(option: str, value: object) -> tuple[int, int]:
    """Return `[height, width]` in pixels; one number sets both."""
    if not validators.is_list(value):
        return (check_whole_number(option, value, minimum=1),) * 2
    height, width = validate_option(option, _TWO, check_whole_numbers(option, value, minimum=1))
    return height, width


_TWO = validators.values_matching("one number or [height, width]", lambda sizes: len(sizes) == 2)


def parse_numeric_dtype(option: str, value: object) -> np.dtype[Any]:
    """Return the numpy dtype of integers or floats named by `value`."""
    return validate_option(option, _parse_dtype, value)


def _parse_dtype(value: Any) -> np.dtype[Any]:
    try:
        dtype = np.dtype(value) if value is not None else None
    except TypeError:
        dtype = None
    if dtype is None or dtype.kind not in "iuf":
        expected = "the name of a numpy dtype of integers or floats, such as float32 or int64"
        raise validators.invalid_value_error(expected, value)
    return dtype


def check_existing_path(option: str, value: object) -> Path:
    """Return the path `value`, relative to the current directory, which must exist.

    Raises:
        ConfigurationError: the value is not a path.
        DataError: the path does not exist, or is neither a file nor a folder.
    """
    if value == "":
        raise ConfigurationError(f"{option} must be a path, got ''")
    path = validate_option(option, validators.file_path, value).expanduser()
    if not path.exists():
        folder = find_working_directory() or "deleted"
        raise DataError(f"{option}: {path} does not exist (working directory: {folder})")
    try:
        require_regular_file(path)
    except OSError as error:
        raise DataError(f"{option}: {path} cannot be read: {error.strerror}") from None
    return path


def check_fits_memory(path: Path) -> None:
    """Check that a text file, which is read whole, fits into memory.

    Raises:
        DataError: the file is larger than the free memory.
    """
    shortage = describe_shortage(path.stat().st_size)
    if shortage:
        raise DataError(f"{path} {shortage}; give a smaller file, or arrays in .npy files")


def check_existing_folder(option: str, value: object) -> Path:
    """Return the folder `value`, which must exist; errors as for `check_existing_path`."""
    path = check_existing_path(option, value)
    if not path.is_dir():
        raise DataError(f"{option} must be a folder; {path} is a file")
    return path


def check_existing_file(option: str, value: object) -> Path:
    """Return the file `value`, which must exist; errors as for `check_existing_path`."""
    path = check_existing_path(option, value)
    if path.is_dir():
        raise DataError(f"{option} must be a file; {path} is a folder")
    return path


def import_package(name: str, needed_by: str, extra: str, called: str | None = None) -> Any:
    """Import the module `name`.

    Args:
        name: name of the module.
        needed_by: name of the caller, for the message.
        extra: our extra that installs the module.
        called: display name in the message; default: `name`.

    Raises:
        MissingFrameworkError: the module is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise MissingFrameworkError(
            f"{needed_by} needs {called or name}; install it with: {install_command(extra)}"
        ) from error
