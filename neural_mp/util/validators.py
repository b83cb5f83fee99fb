"""What may stand in files that we write, in one vocabulary: each kind of value checks its own.

A kind is a function: it takes what was read from a file, and returns the value in its one form, or
raises `UnfitError`. Kinds of lists and mappings are made of others, and add to an error at which
key it is; `core.reading` adds the file. These are functions and not the library `schema`, since a
plan holds numbers by the hundred thousand.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from neural_mp.errors import NeuralMPError, did_you_mean
from neural_mp.util.string_enum import Word

T = TypeVar("T")
W = TypeVar("W", bound=Word)
Kind = Callable[[Any], T]

#: Whole numbers beyond are none that anything of ours was counted with.
_MOST = 1 << 63
#: Characters of a found value or key that an error shows.
_SHOWN = 80
#: Characters of a text that is a word or a few.
_BRIEF = 200


class UnfitError(NeuralMPError):
    """A value in a file is not of the kind that stands there."""


def unfit(expected: str, found: Any) -> UnfitError:
    """The error for a value, which is shown cut short."""
    return UnfitError(f"expected {expected}, found {shown(found)}")


def shown(value: Any) -> str:
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


def text(value: Any) -> str:
    """A text that can be printed: half of a pair of surrogates cannot."""
    if not isinstance(value, str):
        raise unfit("a text", value)
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise unfit("a text in Unicode", value) from None
    return value


def brief(value: Any) -> str:
    """A text of a few words, which errors may show whole."""
    if len(text(value)) > _BRIEF:
        raise unfit("a few words", value)
    return str(value)


def truth(value: Any) -> bool:
    """True or false."""
    if not isinstance(value, bool):
        raise unfit("true or false", value)
    return value


def whole(value: Any) -> int:
    """A whole number."""
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _MOST:
        raise unfit("a whole number", value)
    return value


def count(value: Any) -> int:
    """A whole number from 0."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST:
        raise unfit("a whole number from 0", value)
    return value


def number(value: Any) -> float:
    """A number, also an infinite one, or NaN."""
    if isinstance(value, float):
        return value
    if isinstance(value, bool) or not isinstance(value, int) or abs(value) >= _MOST:
        raise unfit("a number", value)
    return value


def finite(value: Any) -> float:
    """A number that is neither infinite nor NaN, as a float."""
    found = float(number(value))
    if not math.isfinite(found):
        raise unfit("a finite number", value)
    return found


def amount(value: Any) -> float:
    """A finite number from 0, as a float."""
    found = finite(value)
    if found < 0:
        raise unfit("a number from 0", value)
    return found


def positive(value: Any) -> float:
    """A finite number above 0, as a float."""
    found = finite(value)
    if found <= 0:
        raise unfit("a number above 0", value)
    return found


def finite_numbers(value: Any) -> tuple[float, ...]:
    """A list of finite numbers, as floats; quick also for many."""
    if not isinstance(value, list | tuple):
        raise unfit("a list of numbers", value)
    if set(map(type, value)) <= {float} and all(map(math.isfinite, value)):
        return tuple(value)
    return list_of(finite)(value)


def word(words: type[W]) -> Kind[W]:
    """One of these words."""
    known: Mapping[str, W] = {one.value: one for one in words}

    def read(value: Any) -> W:
        found = known.get(value) if isinstance(value, str) else None
        if found is None:
            raise UnfitError(
                f"expected one of {', '.join(known)}, found {shown(value)}"
                + (did_you_mean(value, known) if isinstance(value, str) and len(value) < 50 else "")
            )
        return found

    return read


def optional(kind: Kind[T]) -> Kind[T | None]:
    """A kind, or nothing."""

    def read(value: Any) -> T | None:
        return None if value is None else kind(value)

    return read


def list_of(kind: Kind[T]) -> Kind[tuple[T, ...]]:
    """A list of a kind."""

    def read(value: Any) -> tuple[T, ...]:
        if not isinstance(value, list | tuple):
            raise unfit("a list", value)
        found = []
        try:
            for item in value:
                found.append(kind(item))
        except NeuralMPError as error:
            error.keys = (len(found), *error.keys)
            raise
        return tuple(found)

    return read


def tuple_of(*kinds: Kind[Any]) -> Kind[tuple[Any, ...]]:
    """A list of so many values, each of its own kind."""

    def read(value: Any) -> tuple[Any, ...]:
        if not isinstance(value, list | tuple) or len(value) != len(kinds):
            raise unfit(f"a list of {len(kinds)}", value)
        return tuple(at(place, kind, value[place]) for place, kind in enumerate(kinds))

    return read


def mapping_of(kind: Kind[T]) -> Kind[dict[str, T]]:
    """A mapping of texts to a kind."""

    def read(value: Any) -> dict[str, T]:
        if not isinstance(value, Mapping):
            raise unfit("a mapping", value)
        found: dict[str, T] = {}
        key: Any = ""
        try:
            for key, item in value.items():
                found[text(key)] = kind(item)
        except NeuralMPError as error:
            error.keys = (key, *error.keys)
            raise
        return found

    return read


def fields(
    kinds: Mapping[str, Kind[Any]], optional: Sequence[str] = (), *, strict: bool = False
) -> Kind[dict[str, Any]]:
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
            raise unfit(f"a mapping with the keys {', '.join(kinds)}", value)
        for key in needed:
            if key not in value:
                raise UnfitError(f"expected the key {key!r}, found {shown(value)} without it")
        if strict:
            for key in value:
                if key not in kinds:
                    known = did_you_mean(str(key)[:_SHOWN], kinds)
                    raise UnfitError(f"unknown key {shown(key)}{known}")
        return {key: at(key, kind, value[key]) for key, kind in kinds.items() if key in value}

    return read


def at(key: str | int, kind: Kind[T], value: Any) -> T:
    """A value of a kind; an error says at which key it stands.

    Raises:
        NeuralMPError: it is not of that kind.
    """
    try:
        return kind(value)
    except NeuralMPError as error:
        error.keys = (key, *error.keys)
        raise


def checked(kind: Kind[Any]) -> Kind[Any]:
    """A value as it was read, which is of a kind."""

    def read(value: Any) -> Any:
        kind(value)
        return value

    return read
