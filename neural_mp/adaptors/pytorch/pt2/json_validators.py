"""Validators of what stands in the JSON text of a program, beyond those of `util.validators`."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

from neural_mp.util.validators import (
    InvalidValueError,
    Validator,
    invalid,
    is_integer,
    matching,
    preview,
    validate_at,
)

#: Names become those of variables in code that torch.fx writes and runs.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Names of parameters and modules stand between quotes in that code.
_PATH = re.compile(r"[\w .:@+=/-]*")
_LINE = re.compile(r"[^\x00-\x1f\x7f]*")
#: What generated code takes from its surroundings.
_TAKEN = frozenset({"self", "torch"})
#: What JSON has no number for, in files of torch 2.7 or later.
_NO_NUMBERS = ("Infinity", "-Infinity", "NaN")


def _text_like(expected: str, test: Callable[[str], Any]) -> Validator[str]:
    return matching(expected, lambda value: isinstance(value, str) and test(value))


def _is_variable(word: str) -> bool:
    return bool(_NAME.fullmatch(word)) and not keyword.iskeyword(word) and word not in _TAKEN


def _is_path(word: str) -> bool:
    parts = word.split(".")
    return bool(_PATH.fullmatch(word)) and not any(
        part.startswith("__") and part.endswith("__") for part in parts if part
    )


def _is_real(value: Any) -> bool:
    if isinstance(value, str):
        return value in _NO_NUMBERS
    return isinstance(value, float) or (is_integer(value) and abs(value) <= 2**64)


int64: Validator[int] = matching(
    "a whole number of 64 bits", lambda value: is_integer(value) and abs(value) <= 2**64
)
real: Validator[float | str] = matching(
    "a number", _is_real, lambda value: float(value) if is_integer(value) else value
)
#: Any text; it is only ever compared, or written as a literal.
text = _text_like("a text", lambda _: True)
line = _text_like("a line of text", _LINE.fullmatch)
name = _text_like("a name", _is_variable)
#: Some are called as Python's words are, some not at all.
argument_name = _text_like(
    "the name of an argument", lambda word: not word or _NAME.fullmatch(word)
)
#: In any script.
parameter_name = _text_like(
    "the name of a parameter", lambda word: word.isidentifier() and not keyword.iskeyword(word)
)
#: Dotted, also of a tensor in it.
path = _text_like("the name of a module", _is_path)
nothing: Validator[Any] = matching("nothing, since no such part is loaded", lambda value: not value)


def one_form(forms: Mapping[str, Validator[Any]]) -> Validator[dict[str, Any]]:
    """A dict of a single key, which names the form of its value."""

    def copied(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) != 1:
            raise invalid("a value of one of several forms", value)
        ((key, item),) = value.items()
        if key not in forms:
            raise InvalidValueError(f"the form {preview(key)} of a value is never loaded")
        return {key: validate_at(key, forms[key], item)}

    return copied
