"""String enumerations with parsing."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import TypeVar

from neural_mp.errors import ConfigurationError, NeuralMPError, did_you_mean

W = TypeVar("W", bound="StringEnum")


class StringEnum(str, Enum):
    """Enumeration whose members equal, hash like and print as their value."""

    __hash__ = str.__hash__

    def __str__(self) -> str:
        return str(self.value)

    @classmethod
    def parse(
        cls: type[W],
        value: object,
        what: str,
        error: Callable[[str], NeuralMPError] = ConfigurationError,
    ) -> W:
        """Return the member with a value; `what` names the value in messages.

        Raises:
            NeuralMPError: from `error`, if no member has the value.
        """
        if isinstance(value, cls):  # of the many quantizations in a search space, nearly every word
            return value
        values = [member.value for member in cls]
        if not isinstance(value, str) or value not in values:
            raise error(f"{what} cannot be {value!r}{did_you_mean(str(value), values)}")
        return cls(value)
