"""Composable validators: the one vocabulary for files that we wrote, files of users, and options.

A validator is a function: it takes a value, and returns it in its one form, or raises
`InvalidValueError`. Those of lists and mappings are made of others, and add to an error at which
key it is. Who calls them says where the value comes from: `io.readers.reading` names the file,
`config.schema` the line and the key of a tuning file, `validate_option` the option.

They are functions, and not those of a library. msgspec, cattrs and pydantic turn data into classes
by their annotations: most of what is read here has no class, numbers have bounds, and a word of
another toolkit stands for one of ours, so that each would take a hook of its own. They know the
place of a mistake as text of theirs only, and name no likely word for a misspelled one. The
library schema takes predicates, as here, but a second for the hundred thousand numbers of a plan,
fifty times as long, and where a value is wrong has to be picked out of its messages.
"""

from __future__ import annotations

import math
import os
import reprlib
from collections.abc import Callable, Iterable, Mapping, Sequence
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

#: The largest seed of random numbers: numpy's old generators, which Optuna uses, take 32 bits.
MAX_SEED = (1 << 32) - 1
#: The most of whatever is counted in an option.
MOST = (1 << 31) - 1
#: The most seconds of a limit of time, 31 years: waiting functions refuse more than centuries.
MOST_SECONDS = 10**9
#: Whole numbers beyond are none that anything of ours was counted with.
_MAX_INTEGER = 1 << 63
#: The most bytes of an array that an option gives the sizes of.
_MOST_BYTES = 1 << 32
#: Bytes of a path, and of a name in it, of common file systems.
_LONGEST_PATH, _LONGEST_NAME = 4096, 255
#: Characters of a found value or key that an error shows.
_MAX_PREVIEW_CHARS = 80
#: Characters of a message together with the keys before it.
_LONGEST_MESSAGE = 2000
#: Characters of a text that is a word or a few.
_BRIEF = 200


class InvalidValueError(NeuralMPError):
    """A value is not what its place asks for.

    Attributes:
        requirement: the message, to follow the name of an option; empty where it stands alone.
    """

    requirement: str = ""


def invalid(expected: str, found: Any, hint: str = "") -> InvalidValueError:
    """The error for a value, which is shown cut short; with a hint that starts with `; `."""
    shown = preview(found)
    error = InvalidValueError(f"expected {expected}, found {shown}{hint}")
    error.requirement = f"must be {expected}, got {shown}{hint}"
    return error


class _Preview(reprlib.Repr):
    """Quick also where there is much, or where it is nested deeply."""

    def repr_int(self, x: int, level: int) -> str:
        return f"a number of {x.bit_length()} bits" if abs(x) >= 1 << 128 else repr(x)

    def repr_dict(self, x: dict[Any, Any], level: int) -> str:
        few = dict(islice(x.items(), self.maxdict + 1))  # all of them would be sorted
        return super().repr_dict(few, level)


_PREVIEW = _Preview()


def preview(value: Any) -> str:
    """A value in words, cut short, however large it is, or deeply nested."""
    if isinstance(value, str | bytes):
        return _cut(repr(value[: _MAX_PREVIEW_CHARS + 1]))
    known = isinstance(value, dict | list | tuple | int) and not isinstance(value, bool)
    return _cut(_PREVIEW.repr(value) if known else repr(value))


def key_words(key: object) -> str:
    """A key in words, cut short, for the place that an error names."""
    return _cut(str(key) if str(key).isprintable() else repr(key))


def _cut(words: str) -> str:
    return words if len(words) <= _MAX_PREVIEW_CHARS else f"{words[: _MAX_PREVIEW_CHARS - 1]}…"


def located(error: Exception) -> str:
    """The message of an error, cut short, after the keys where its mistake is."""
    where = ".".join(map(key_words, getattr(error, "keys", ())))
    return (f"{where}: {error}" if where else str(error))[:_LONGEST_MESSAGE]


def validate_at(key: str | int, validator: Validator[T], value: Any) -> T:
    """A checked value; an error says at which key it stands.

    Raises:
        NeuralMPError: it is refused.
    """
    try:
        return validator(value)
    except NeuralMPError as error:
        error.keys = (key, *error.keys)
        raise


def validate_option(
    name: str,
    validator: Validator[T],
    value: Any,
    error: Callable[[str], NeuralMPError] = ConfigurationError,
) -> T:
    """A checked value of an option, in Python or YAML.

    Args:
        name: what the message calls it.
        validator: of the value.
        value: what was given.
        error: makes the error that is raised.

    Raises:
        NeuralMPError: the value is refused.
    """
    try:
        return validator(value)
    except InvalidValueError as found:
        which = f"each of {name}" if found.keys else name
        words = f"{which} {found.requirement}" if found.requirement else f"{which}: {found}"
        raise error(words) from None


def anything(value: Any) -> Any:
    """Whatever it is; what takes it looks at it."""
    return value


def string(value: Any) -> str:
    """A text that can be printed: half of a pair of surrogates cannot."""
    if not isinstance(value, str):
        raise invalid("a text", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise invalid("a text in Unicode", value) from None
    return value


def short_string(value: Any) -> str:
    """A text of a few words, which errors may show whole."""
    if len(string(value)) > _BRIEF:
        raise invalid("a few words", value)
    return str(value)


def without_nul(value: T) -> T:
    """Anything but a text or path that holds the character NUL, which no file or URL has."""
    if isinstance(value, str | Path) and "\0" in str(value):
        raise invalid("a text without the character NUL", str(value))
    return value


def file_path(value: Any) -> Path:
    """A path that a file can have."""
    if not isinstance(value, str | Path):
        raise invalid("a path", value)
    try:
        names = os.fsencode(without_nul(value)).split(os.fsencode(os.sep))
    except UnicodeEncodeError:
        raise invalid("a path in Unicode", str(value)) from None
    if len(os.fsencode(value)) > _LONGEST_PATH or max(map(len, names)) > _LONGEST_NAME:
        longest = f"{_LONGEST_PATH} bytes, and {_LONGEST_NAME} for each name in it"
        raise invalid(f"a path of at most {longest}", str(value))
    return Path(value)


def matching(
    expected: str, test: Callable[[Any], Any], convert: Callable[[Any], Any] = anything
) -> Validator[Any]:
    """A value that passes a test, converted.

    Args:
        expected: what the test asks for, in words.
        test: of the value.
        convert: what makes the one form of it.
    """

    def read(value: Any) -> Any:
        if not test(value):
            raise invalid(expected, value)
        return convert(value)

    return read


def is_integer(value: Any) -> bool:
    """Whether a value is a whole number, also one of numpy's."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def is_finite(value: Any) -> bool:
    """Whether a value is a number that a float can hold, and neither infinite nor NaN."""
    try:
        return isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    except OverflowError:  # of a whole number that no float can hold
        return False


def _is_counted(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < _MAX_INTEGER


def integer_between(least: int, most: int = MOST) -> Validator[int]:
    """A whole number within bounds, as an int."""
    return matching(
        f"a whole number from {least} to {most}",
        lambda value: is_integer(value) and least <= value <= most,
        int,
    )


seed_number = integer_between(0, MAX_SEED)
boolean: Validator[bool] = matching("true or false", lambda value: isinstance(value, bool))
integer: Validator[int] = matching("a whole number", _is_counted)
non_negative_integer: Validator[int] = matching(
    "a whole number from 0", lambda value: _is_counted(value) and value >= 0
)
#: Also an infinite one, or NaN.
number: Validator[float] = matching(
    "a number", lambda value: isinstance(value, float) or _is_counted(value)
)
finite: Validator[float] = matching("a finite number", is_finite, float)
non_negative_float: Validator[float] = matching(
    "a finite number from 0", lambda value: is_finite(value) and value >= 0, float
)
positive_float: Validator[float] = matching(
    "a finite number above 0", lambda value: is_finite(value) and value > 0, float
)


def finite_numbers(value: Any) -> tuple[float, ...]:
    """A list of finite numbers, as floats; quick also for many."""
    if is_list(value) and set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
        return tuple(value)
    return list_of(finite, "a list of numbers")(value)


def shape_of_array(itemsize: int) -> Validator[tuple[int, ...]]:
    """The sizes of an array that does not fill the memory, `itemsize` bytes a value."""
    return matching(
        f"the sizes of an array of at most {_MOST_BYTES >> 30} GiB",
        lambda shape: math.prod(shape) * itemsize <= _MOST_BYTES,
    )


def one_of(words: Iterable[str], expected: str = "") -> Validator[str]:
    """One of these words; `expected` says so where a list of them does not."""
    known = tuple(words)
    expected = expected or f"one of {', '.join(known)}"

    def read(value: Any) -> str:
        if isinstance(value, str) and value in known:
            return str(value)
        near = did_you_mean(value, known) if isinstance(value, str) else ""
        raise invalid(expected, value, near if near.endswith("?") else "")  # all are named before

    return read


def enum_of(words: type[W]) -> Validator[W]:
    """One of these words."""
    known: Mapping[str, W] = {one.value: one for one in words}
    check = one_of(known)
    return lambda value: known[check(value)]


def optional(validator: Validator[T]) -> Validator[T | None]:
    """A value, or nothing."""
    return lambda value: None if value is None else validator(value)


def is_list(value: Any) -> bool:
    """Whether a value is a list, a tuple or the like, and no text."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def list_of(
    validator: Validator[T], expected: str = "a list", most: float = math.inf
) -> Validator[tuple[T, ...]]:
    """A list of values of one kind, at most so many, as a tuple."""

    def read(value: Any) -> tuple[T, ...]:
        if not is_list(value) or len(value) > most:
            raise invalid(expected, value)
        return tuple(validate_at(i, validator, item) for i, item in enumerate(value))

    return read


def tuple_of(*validators: Validator[Any]) -> Validator[tuple[Any, ...]]:
    """A list of so many values, each of its own kind."""

    def read(value: Any) -> tuple[Any, ...]:
        if not is_list(value) or len(value) != len(validators):
            raise invalid(f"a list of {len(validators)}", value)
        return tuple(validate_at(i, check, value[i]) for i, check in enumerate(validators))

    return read


def mapping_of(validator: Validator[T], key: Validator[str] = string) -> Validator[dict[str, T]]:
    """A mapping of texts to values of one kind."""

    def read(value: Any) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise invalid("a mapping", value)
        return {
            validate_at(name, key, name): validate_at(name, validator, item)
            for name, item in value.items()
        }

    return read


def record(
    needed: Mapping[str, Validator[Any]],
    others: Mapping[str, Validator[Any]] = MappingProxyType({}),
    *,
    strict: bool = False,
) -> Validator[dict[str, Any]]:
    """A mapping with these keys.

    Args:
        needed: key → validator.
        others: those of keys that may be left out, and then are left out of the result, too.
        strict: whether more keys are a mistake; else they are left out, since a later version may
            have written them.
    """
    known = {**needed, **others}

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise invalid(f"a mapping with the keys {', '.join(known)}", value)
        for key in needed:
            if key not in value:
                raise invalid(f"the key {key!r}", value)
        for key in value if strict else ():
            if key not in known:
                near = did_you_mean(str(key)[:_MAX_PREVIEW_CHARS], known)
                raise InvalidValueError(f"unknown key {preview(key)}{near}")
        return {key: validate_at(key, known[key], value[key]) for key in known if key in value}

    return read


def checked(validator: Validator[Any]) -> Validator[Any]:
    """A value as it was read, which another validator takes."""

    def read(value: Any) -> Any:
        validator(value)
        return value

    return read
