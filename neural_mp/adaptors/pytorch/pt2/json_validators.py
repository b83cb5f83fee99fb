"""Forms that parts of a JSON text have: what fits one is copied, and nothing else goes along."""

from __future__ import annotations

import keyword
import re
from collections.abc import Callable, Mapping
from typing import Any

from neural_mp.io.limits import MAX_PROGRAM_INTEGER
from neural_mp.util.validators import shown

#: What is left of a value where it has the form; raises ValueError where it has not.
Form = Callable[[Any], Any]

#: Names become those of variables in code that torch.fx writes and runs.
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*", re.ASCII)
#: Names of parameters and modules stand between quotes in that code.
_PATH = re.compile(r"[\w .:@+=/-]*")
_LINE = re.compile(r"[^\x00-\x1f\x7f]*")
#: What generated code takes from its surroundings.
_TAKEN = frozenset({"self", "torch"})


def boolean(value: Any) -> bool:
    """True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{shown(value)} stands where true or false is expected")
    return value


def integer(value: Any) -> int:
    """A whole number of at most 64 bits."""
    if type(value) is not int or abs(value) > MAX_PROGRAM_INTEGER:
        raise ValueError(f"{shown(value)} stands where a number of 64 bits is expected")
    return value


def real(value: Any) -> float | str:
    """A number; what JSON has no number for is a text, in files of torch 2.7 or later."""
    if isinstance(value, str) and value in ("Infinity", "-Infinity", "NaN"):
        return value
    if type(value) is int:
        return float(integer(value))
    if type(value) is not float:
        raise ValueError(f"{shown(value)} stands where a number is expected")
    return value


def text(value: Any) -> str:
    """Any text; it is only ever compared, or written as a literal."""
    if not isinstance(value, str):
        raise ValueError(f"{shown(value)} stands where a text is expected")
    return value


def line(value: Any) -> str:
    """A text without control characters."""
    if not _LINE.fullmatch(text(value)):
        raise ValueError(f"{shown(value)} stands where a line of text is expected")
    return str(value)


def name(value: Any) -> str:
    """A name that a variable may have."""
    if not _NAME.fullmatch(text(value)) or keyword.iskeyword(value) or value in _TAKEN:
        raise ValueError(f"{shown(value)} stands where a name is expected")
    return str(value)


def argument_name(value: Any) -> str:
    """The name of an op's argument: some are called as Python's words are, some not at all."""
    if value and not _NAME.fullmatch(text(value)):
        raise ValueError(f"{shown(value)} stands where the name of an argument is expected")
    return text(value)


def parameter_name(value: Any) -> str:
    """The name of a function's parameter, in any script."""
    if not text(value).isidentifier() or keyword.iskeyword(value):
        raise ValueError(f"{shown(value)} stands where the name of a parameter is expected")
    return str(value)


def path(value: Any) -> str:
    """The dotted name of a module or of a tensor in it."""
    if not _PATH.fullmatch(text(value)) or any(
        part.startswith("__") and part.endswith("__") for part in value.split(".") if part
    ):
        raise ValueError(f"{shown(value)} stands where the name of a module is expected")
    return str(value)


def nothing(value: Any) -> Any:
    """An empty list or dict, or nothing."""
    if value:
        raise ValueError(f"it holds {shown(value)}, which is never loaded")
    return value


def listed(form: Form, most: int | None = None) -> Form:
    """A list of parts of one form."""

    def copied(value: Any) -> list[Any]:
        if not isinstance(value, list) or (most is not None and len(value) > most):
            raise ValueError(f"{shown(value)} stands where a list is expected")
        return [form(item) for item in value]

    return copied


def keyed(keys: Form, form: Form) -> Form:
    """A dict of parts of one form under keys of one form."""

    def copied(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{shown(value)} stands where names and values are expected")
        return {keys(key): form(item) for key, item in value.items()}

    return copied


def record(fields: Mapping[str, Form], optional_fields: Mapping[str, Form] | None = None) -> Form:
    """A dict of known keys; others, those of later versions, do not go along."""
    known = {**fields, **(optional_fields or {})}

    def copied(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise ValueError(f"{shown(value)} stands where {', '.join(fields)} are expected")
        missing = fields.keys() - value.keys()
        if missing:
            raise ValueError(f"{min(missing)} is missing in {shown(value)}")
        return {key: form(value[key]) for key, form in known.items() if key in value}

    return copied


def one_of(forms: Mapping[str, Form]) -> Form:
    """A dict of a single key, which names the form of its value."""

    def copied(value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or len(value) != 1:
            raise ValueError(f"{shown(value)} stands where one of several forms is expected")
        ((key, item),) = value.items()
        form = forms.get(key)
        if form is None:
            raise ValueError(f"it holds a value of the form {shown(key)}, which is never loaded")
        return {key: form(item)}

    return copied
