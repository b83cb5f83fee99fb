"""What may stand in files that we write, in one vocabulary: each kind of value checks its own.

A validator is a function: it takes what was read from a file, and returns the value in its one
form, or raises `InvalidValueError`. Those of lists and mappings are made of others, and add to an
error at which key it is; `io.readers` adds the file. These are functions and not the library
`schema`, since a plan holds numbers by the hundred thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from neural_mp.core.enums import Word
from neural_mp.errors import NeuralMPError, did_you_mean

T = TypeVar("T")
W = TypeVar("W", bound=Word)
Validator = Callable[[Any], T]

#: Whole numbers beyond are none that anything of ours was counted with.
_MOST = 1 << 63
#: Characters of a found value or key that an error shows.
_SHOWN = 80
#: Characters of a text that is a word or a few.
_BRIEF = 200


class InvalidValueError(NeuralMPError):
    """A value in a file is not of the kind that stands there."""


def invalid(expected: str, found: Any) -> InvalidValueError:
    """The error for a value, which is shown cut short."""
    return InvalidValueError(f"expected {expected}, found {preview(found)}")


def preview(value: Any) -> str:
    """A value in words, however large it is, or deeply nested."""
    if isinstance(value, Mapping):
        return f"a mapping of {len(value)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    if isinstance(value, int) and abs(value) >= _MOST:
        return "a whole number of very many digits"
    cut = value[: _SHOWN + 1] if isinstance(value, str | bytes) else value
    words = repr(cut)
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"


def key_words(key: object) -> str:
    """A key in words, cut short, for the place that an error names."""
    words = str(key) if str(key).isprintable() else repr(key)
    return words if len(words) <= _SHOWN else f"{words[: _SHOWN - 1]}…"


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


def boolean(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise invalid("true or false", value)
    return value


def integer(value: Any) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _MOST:
        raise invalid("a whole number", value)
    return value


def non_negative_integer(value: Any) -> int:
    """A whole number from 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise invalid("a whole number from 0", value)
    return value


def number(value: Any) -> float:
    """A number, also an infinite one, or NaN."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _MOST:
        raise invalid("a number", value)
    return value


def finite(value: Any) -> float:
    """A number that is neither infinite nor NaN, as a float."""
    found = float(number(value))
    if not math.isfinite(found):
        raise invalid("a finite number", value)
    return found


def non_negative_float(value: Any) -> float:
    """A finite number from 0, as a float."""
    found = finite(value)
    if found < 0:
        raise invalid("a number from 0", value)
    return found


def positive_float(value: Any) -> float:
    """A finite number above 0, as a float."""
    found = finite(value)
    if found <= 0:
        raise invalid("a number above 0", value)
    return found


def finite_numbers(value: Any) -> tuple[float, ...]:
    """A list of finite numbers, as floats; quick also for many."""
    if not isinstance(value, list | tuple):
        raise invalid("a list of numbers", value)
    if set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
        return tuple(value)
    return list_of(finite)(value)


def enum_of(words: type[W]) -> Validator[W]:
    """One of these words."""
    known: Mapping[str, W] = {one.value: one for one in words}

    def read(value: Any) -> W:
        found = known.get(value) if isinstance(value, str) else None
        if found is None:
            raise InvalidValueError(
                f"expected one of {', '.join(known)}, found {preview(value)}"
                + (did_you_mean(value, known) if isinstance(value, str) and len(value) < 50 else "")
            )
        return found

    return read


def optional(kind: Validator[T]) -> Validator[T | None]:
    """A kind, or nothing."""

    def read(value: Any) -> T | None:
        return None if value is None else kind(value)

    return read


def list_of(kind: Validator[T]) -> Validator[tuple[T, ...]]:
    """A list of a kind."""

    def read(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise invalid("a list", value)
        found = []
        try:
            for item in value:
                found.append(kind(item))
        except NeuralMPError as error:
            error.keys = (len(found), *error.keys)
            raise
        return tuple(found)

    return read


def tuple_of(*kinds: Validator[Any]) -> Validator[tuple[Any, ...]]:
    """A list of so many values, each of its own kind."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise invalid(f"a list of {len(kinds)}", value)
        return tuple(validate_at(place, kind, value[place]) for place, kind in enumerate(kinds))

    return read


def mapping_of(kind: Validator[T]) -> Validator[dict[str, T]]:
    """A mapping of texts to a kind."""

    def read(value: Any) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise invalid("a mapping", value)
        found: dict[str, T] = {}
        key: Any = ""
        try:
            for key, item in value.items():
                found[string(key)] = kind(item)
        except NeuralMPError as error:
            error.keys = (key, *error.keys)
            raise
        return found

    return read


def record(
    kinds: Mapping[str, Validator[Any]], optional: Sequence[str] = (), *, strict: bool = False
) -> Validator[dict[str, Any]]:
    """A mapping with these keys, each with its own kind.

    Args:
        kinds: key → kind.
        optional: keys that may be left out, and then are left out of the result, too.
        strict: whether other keys are a mistake; else they are left out, since a later version may
            have written them.
    """
    needed = [key for key in kinds if key not in optional]

    def read(value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise invalid(f"a mapping with the keys {', '.join(kinds)}", value)
        for key in needed:
            if key not in value:
                raise InvalidValueError(
                    f"expected the key {key!r}, found {preview(value)} without it"
                )
        if strict:
            for key in value:
                if key not in kinds:
                    known = did_you_mean(str(key)[:_SHOWN], kinds)
                    raise InvalidValueError(f"unknown key {preview(key)}{known}")
        return {
            key: validate_at(key, kind, value[key]) for key, kind in kinds.items() if key in value
        }

    return read


def validate_at(key: str | int, kind: Validator[T], value: Any) -> T:
    """A value of a kind; an error says at which key it stands.

    Raises:
        NeuralMPError: it is not of that kind.
    """
    try:
        return kind(value)
    except NeuralMPError as error:
        error.keys = (key, *error.keys)
        raise


def checked(kind: Validator[Any]) -> Validator[Any]:
    """A value as it was read, which is of a kind."""

    def read(value: Any) -> Any:
        kind(value)
        return value

    return read
