"""Enums of strings: a few words, equal to their text."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Any, TypeVar

from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean

W = TypeVar("W", bound="StringEnum")


class StringEnum(str, Enum):
    """One of a few words; equal to its text, found under it in dicts, and printed as it."""

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def parse(
        cls: type[W],
        value: Any,
        what: str,
        error: Callable[[str], NeuralMPError] = ConfigurationError,
    ) -> W:
        """The word that a text stands for.

        Args:
            value: the text, or the word itself.
            what: what the message calls it.
            error: makes the error that is raised.

        Raises:
            NeuralMPError: it is none of the words.
        """
        known = [word.value for word in cls]
        if not isinstance(value, str) or value not in known:
            raise error(f"{what} cannot be {value!r}{did_you_mean(str(value), known)}")
        return cls(value)
