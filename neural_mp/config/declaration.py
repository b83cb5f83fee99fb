"""The declaration of an option."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from neural_mp.config.source import KeyPath
from neural_mp.util.validators import Validator, anything, one_of, optional, validate_option

_LINK_RE = re.compile(r"\[([^]]+)\]\([^)]+\)")
V_co = TypeVar("V_co", covariant=True)
W_contra = TypeVar("W_contra", contravariant=True)


class Parsed(Protocol[V_co, W_contra]):
    """Type of an option that is set as `W_contra` and read as `V_co`."""

    def __get__(self, instance: object, owner: type | None = None) -> V_co: ...

    def __set__(self, instance: object, value: W_contra) -> None: ...


class Option:
    """The declaration of an option, and the attribute of `Options` that holds its value.

    Attributes:
        name: name of the attribute, and of a flag with hyphens.
        default: value until the option is set.
        help: the meaning, in Markdown, as in the tables of the documentation.
        path: key path in a tuning file; empty for an option of Python alone.
        rule: validator of a value set in Python; applied before the model is loaded.
        in_file: validator of the value in a tuning file; default: `rule`.
        in_inc_file: the same for files of Intel Neural Compressor; default: `in_file`.
        parse: value set in Python → value of the option; applied at once.
        flag: help of the flag of `neural-mp tune`; empty for an option without a flag.
        shown: whether reports list the option.
        choices: the words that the option accepts in a tuning file; empty for other values.
        default_words: the default in tables, if it is not a value to write.
    """

    name: str

    def __init__(
        self,
        default: Any,
        help: str,
        path: str = "",
        *,
        rule: Validator[Any] = anything,
        in_file: Validator[Any] | None = None,
        in_inc_file: Validator[Any] | None = None,
        parse: Callable[[Any], Any] = anything,
        flag: str = "",
        choices: Sequence[str] = (),
        shown: bool = False,
        default_words: str = "",
    ) -> None:
        self.default, self.help, self.flag, self.shown = default, help, flag, shown
        self.path: KeyPath = tuple(path.split(".")) if path else ()
        self.rule = optional(rule) if default is None else rule
        self.choices = choices
        self.in_file: Validator[Any] = in_file or (one_of(choices) if choices else rule)
        self.in_inc_file = in_inc_file or self.in_file
        self.parse, self.default_words = parse, default_words

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object | None, owner: type | None = None) -> Any:
        if instance is None:
            return self
        options = vars(instance)
        if self.name not in options and isinstance(self.default, dict):
            options[self.name] = dict(self.default)  # users may extend the mapping
        return options.get(self.name, self.default)

    def __set__(self, instance: object, value: object) -> None:
        vars(instance)[self.name] = self.parse(value)

    @property
    def plain_help(self) -> str:
        """The meaning without links."""
        return _LINK_RE.sub(r"\1", self.help)

    def check_value(self, value: object) -> Any:
        """Return a validated value.

        Raises:
            ConfigurationError: the value is invalid.
        """
        return validate_option(self.name, self.rule, value)


def declare_option(default: Any, help: str, path: str = "", **rest: Any) -> Any:
    """Return an `Option`, typed as the value that the attribute has."""
    return Option(default, help, path, **rest)
