"""Composable validators for files of this package, files of users, and options.

A validator is a function that returns a value in its normal form, or raises `InvalidValueError`.
Validators of lists and mappings are composed of others, and add the key to an error. The caller
adds the source of the value: `io.readers.file_context` the file, `config.schema` line and key of a
tuning file, `validate_option` the option. `util.json_fields` derives the validator of a dataclass
from its annotations. `StrictOptions` refuses unknown attributes of options.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from itertools import islice
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean
from neural_mp.util.string_enum import StringEnum

T = TypeVar("T")
W = TypeVar("W", bound=StringEnum)
Validator = Callable[[Any], T]

#: Largest random seed: numpy's legacy generators, used by Optuna, take 32 bits.
MAX_SEED = (1 << 32) - 1
#: Upper bound of counts in options.
MOST = (1 << 31) - 1
#: Upper bound of concurrent calls of a model.
MOST_STREAMS = 1024
#: Upper bound of time limits, 31 years: waiting functions reject centuries.
MOST_SECONDS = 10**9
#: Bound of integers in files (64 bits, signed).
_MAX_INTEGER = 1 << 63
#: Maximum bytes of an array with user-given sizes.
_MAX_ARRAY_BYTES = 1 << 32
#: Maximum bytes of a path, and of a name in a path, in common file systems.
_MAX_PATH_BYTES, _MAX_NAME_BYTES = 4096, 255
#: Characters of a value or key shown in an error.
_MAX_PREVIEW_CHARS = 80
#: Characters of a message including its keys.
_MAX_MESSAGE_CHARS = 2000
#: Characters of a short string.
_MAX_SHORT_STRING_CHARS = 200


class InvalidValueError(NeuralMPError):
    """An invalid value.

    Attributes:
        requirement: variant of the message to follow an option's name; empty if none.
    """

    requirement: str = ""


def invalid_value_error(expected: str, actual: object, hint: str = "") -> InvalidValueError:
    """Return the error for a value, shown truncated; a hint starts with `; `."""
    value = preview_value(actual)
    error = InvalidValueError(f"expected {expected}, found {value}{hint}")
    error.requirement = f"must be {expected}, got {value}{hint}"
    return error


class _Preview(reprlib.Repr):
    """Fast `repr` for large or deeply nested values."""

    def repr_int(self, x: int, level: int) -> str:
        return f"a number of {x.bit_length()} bits" if abs(x) >= 1 << 128 else repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        few = dict(islice(x.items(), self.maxdict + 1))  # `super` sorts all items
        return super().repr_dict(few, level)


_PREVIEW = _Preview()


def preview_value(value: object) -> str:
    """Return a value as truncated text, however large or deeply nested."""
    if isinstance(value, str | bytes):
        return _truncate_text(repr(value[: _MAX_PREVIEW_CHARS + 1]))
    bounded = isinstance(value, dict | list | tuple | int) and not isinstance(value, bool)
    return _truncate_text(_PREVIEW.repr(value) if bounded else repr(value))


def format_path_key(key: object) -> str:
    """Return a key as truncated text, for the key path of an error."""
    return _truncate_text(str(key) if str(key).isprintable() else repr(key))


def _truncate_text(text: str) -> str:
    return text if len(text) <= _MAX_PREVIEW_CHARS else f"{text[: _MAX_PREVIEW_CHARS - 1]}…"


def format_located_error(error: Exception) -> str:
    """Return the truncated message of an error, after its key path."""
    where = ".".join(map(format_path_key, getattr(error, "keys", ())))
    return (f"{where}: {error}" if where else str(error))[:_MAX_MESSAGE_CHARS]


def validate_at(key: str | int, validator: Validator[T], value: object) -> T:
    """Return a validated value; errors get the key prepended.

    Raises:
        NeuralMPError: the value is invalid.
    """
    try:
        return validator(value)
    except NeuralMPError as error:
        error.keys = (key, *error.keys)
        raise


def validate_option(
    name: str,
    validator: Validator[T],
    value: object,
    error: Callable[[str], NeuralMPError] = ConfigurationError,
) -> T:
    """Return the validated value of an option, in Python or YAML.

    Raises:
        NeuralMPError: from `error`, if the value is invalid; the message starts with `name`.
    """
    try:
        return validator(value)
    except InvalidValueError as cause:
        subject = f"each of {name}" if cause.keys else name
        raise error(
            f"{subject} {cause.requirement}" if cause.requirement else f"{subject}: {cause}"
        ) from None


def anything(value: object) -> Any:
    """Accept any value; its consumer validates."""
    return value


def string(value: object) -> str:
    """Validate a string; unpaired surrogates are refused."""
    if not isinstance(value, str):
        raise invalid_value_error("a string", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid_value_error("a string of valid Unicode", value) from None
    return value


def short_string(value: object) -> str:
    """Validate a short string, which errors may show untruncated."""
    if len(string(value)) > _MAX_SHORT_STRING_CHARS:
        raise invalid_value_error(
            f"a string of at most {_MAX_SHORT_STRING_CHARS} characters", value
        )
    return str(value)


def without_nul(value: T) -> T:
    """Refuse strings and paths with NUL, which no file or URL contains."""
    if isinstance(value, str | Path) and "\0" in str(value):
        raise invalid_value_error("a string without the character NUL", str(value))
    return value


def file_path(value: object) -> Path:
    """Validate a path that can exist, in folders that may be entered."""
    if not isinstance(value, str | Path):
        raise invalid_value_error("a path", value)
    try:
        names = os.fsencode(without_nul(value)).split(os.fsencode(os.sep))
    except UnicodeEncodeError:
        raise invalid_value_error("a path of valid Unicode", str(value)) from None
    if len(os.fsencode(value)) > _MAX_PATH_BYTES or max(map(len, names)) > _MAX_NAME_BYTES:
        limits = f"{_MAX_PATH_BYTES} bytes, with names of at most {_MAX_NAME_BYTES} bytes"
        raise invalid_value_error(f"a path of at most {limits}", str(value))
    try:
        Path(value).stat()
    except PermissionError:
        raise invalid_value_error(
            "a path in folders that you may enter", str(value), "; change the modes of the folders"
        ) from None
    except OSError:
        pass  # what is missing may be created
    return Path(value)


def with_json_schema(validator: Validator[T], **keywords: object) -> Validator[T]:
    """Return the validator with keywords of JSON Schema, which `json_schema` returns."""
    vars(validator)["json_schema"] = keywords
    return validator


def json_schema(validator: Validator[Any]) -> Mapping[str, Any]:
    """Return the JSON Schema of a validator, of any value if it has none."""
    keywords: Mapping[str, Any] = getattr(validator, "json_schema", {})
    return keywords


def values_matching(
    expected: str,
    test: Callable[[Any], Any],
    convert: Callable[[Any], Any] = anything,
    **keywords: object,
) -> Validator[Any]:
    """Return a validator for values that pass a test, named by `expected`, and are converted.

    The keywords are those of JSON Schema.
    """

    def read_matching(value: object) -> Any:
        if not test(value):
            raise invalid_value_error(expected, value)
        return convert(value)

    return with_json_schema(read_matching, **keywords, description=expected)


def is_integer(value: object) -> bool:
    """Whether a value is an integer, including numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: object) -> bool:
    """Whether a value is a finite number that fits in a float."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _is_counted(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER


def integer_between(least: int, most: int = MOST) -> Validator[int]:
    """Return a validator for integers within bounds, converted to int."""
    return values_matching(
        f"a whole number from {least} to {most}",
        lambda value: is_integer(value) and least <= value <= most,
        int,
        type="integer",
        minimum=least,
        maximum=most,
    )


seed_number = integer_between(0, MAX_SEED)
boolean: Validator[bool] = values_matching(
    "true or false", lambda value: isinstance(value, bool), type="boolean"
)
integer: Validator[int] = values_matching("a whole number", _is_counted)
non_negative_integer: Validator[int] = values_matching(
    "a whole number from 0", lambda value: _is_counted(value) and value >= 0
)
#: Includes infinity and NaN.
number: Validator[float] = values_matching(
    "a number", lambda value: isinstance(value, float) or _is_counted(value)
)
finite: Validator[float] = values_matching("a finite number", is_finite, float)
non_negative_float: Validator[float] = values_matching(
    "a finite number from 0", lambda value: is_finite(value) and value >= 0, float
)
positive_float: Validator[float] = values_matching(
    "a finite number above 0", lambda value: is_finite(value) and value > 0, float
)


def validate_nested_numbers(value: object) -> Any:
    """Return a number, boolean, or list of these of any depth."""
    if isinstance(value, list):
        return [validate_nested_numbers(item) for item in value]
    return value if isinstance(value, bool) else number(value)


def finite_numbers(value: Any) -> tuple[float, ...]:
    """Validate a list of finite numbers, as floats; fast for long lists."""
    if is_list(value) and set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
        return tuple(value)
    return list_of(finite, "a list of numbers")(value)


def shape_of_array(itemsize: int) -> Validator[tuple[int, ...]]:
    """Return a validator for array shapes of bounded size, with `itemsize` bytes per element."""
    return values_matching(
        f"the sizes of an array of at most {_MAX_ARRAY_BYTES >> 30} GiB",
        lambda shape: math.prod(shape) * itemsize <= _MAX_ARRAY_BYTES,
    )


def one_of(names: Iterable[str], expected: str = "") -> Validator[str]:
    """Return a validator for some words; `expected` overrides their list in messages."""
    choices = tuple(names)
    expected = expected or f"one of {', '.join(choices)}"

    def read_choice(value: object) -> str:
        if isinstance(value, str) and value in choices:
            return str(value)
        hint = did_you_mean(value, choices) if isinstance(value, str) else ""
        raise invalid_value_error(
            expected, value, hint if hint.endswith("?") else ""
        )  # the message lists all

    return with_json_schema(read_choice, enum=list(choices))


def enum_of(enum: type[W]) -> Validator[W]:
    """Return a validator for members of an enumeration."""
    members: Mapping[str, W] = {member.value: member for member in enum}
    check = one_of(members)
    return lambda value: members[check(value)]


def optional(validator: Validator[T]) -> Validator[T | None]:
    """Return a validator that also accepts None."""
    return lambda value: None if value is None else validator(value)


def is_list(value: object) -> bool:
    """Whether a value is a sequence, but neither string nor bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def list_of(
    validator: Validator[T], expected: str = "a list", most: float = math.inf
) -> Validator[tuple[T, ...]]:
    """Return a validator for lists of valid items, at most `most`, as a tuple."""

    def read_list(value: Any) -> tuple[T, ...]:
        if not is_list(value) or len(value) > most:
            raise invalid_value_error(expected, value)
        return tuple(validate_at(i, validator, item) for i, item in enumerate(value))

    return read_list


def tuple_of(*validators: Validator[Any]) -> Validator[tuple[Any, ...]]:
    """Return a validator for lists with one validator per item."""

    def read_tuple(value: Any) -> tuple[Any, ...]:
        if not is_list(value) or len(value) != len(validators):
            raise invalid_value_error(f"a list of {len(validators)}", value)
        return tuple(validate_at(i, check, value[i]) for i, check in enumerate(validators))

    return read_tuple


def mapping_of(validator: Validator[T], key: Validator[str] = string) -> Validator[dict[str, T]]:
    """Return a validator for mappings of strings to valid values."""

    def read_mapping(value: object) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise invalid_value_error("a mapping", value)
        return {
            validate_at(name, key, name): validate_at(name, validator, item)
            for name, item in value.items()
        }

    return read_mapping


def record(
    needed: Mapping[str, Validator[Any]],
    extra: Mapping[str, Validator[Any]] = MappingProxyType({}),
    *,
    strict: bool = False,
) -> Validator[dict[str, Any]]:
    """Return a validator for mappings with fixed keys.

    Args:
        needed: required key → validator.
        extra: optional key → validator; missing keys stay missing.
        strict: whether unknown keys are errors; else unknown keys, e.g. of a later version, are
            dropped.
    """
    schema = {**needed, **extra}

    def read_record(value: object) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise invalid_value_error(f"a mapping with the keys {', '.join(schema)}", value)
        for key in needed:
            if key not in value:
                raise invalid_value_error(f"the key {key!r}", value)
        for key in value if strict else ():
            if key not in schema:
                hint = did_you_mean(str(key)[:_MAX_PREVIEW_CHARS], schema)
                raise InvalidValueError(f"unknown key {preview_value(key)}{hint}")
        return {key: validate_at(key, schema[key], value[key]) for key in schema if key in value}

    return read_record


def keep_original_value(validator: Validator[Any]) -> Validator[Any]:
    """Return a validator that returns the original value, not the converted one."""

    def read_checked(value: object) -> Any:
        validator(value)
        return value

    return with_json_schema(read_checked, **json_schema(validator))


class StrictOptions:
    """Base of dataclasses of options: an unknown attribute is an error, not a new attribute."""

    def __setattr__(self, name: str, value: object) -> None:
        names = [item.name for item in fields(self)]  # type: ignore[arg-type]
        if name not in names:
            raise ConfigurationError(
                f"{type(self).__name__} has no option {name!r}{did_you_mean(name, names)}"
            )
        super().__setattr__(name, value)
