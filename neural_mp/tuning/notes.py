"""What was measured once and need not be measured again in the same run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

from neural_mp.util.validators import Kind, at, number

T = TypeVar("T")

#: What a run remembers is also read for its record: under the names of the fields of `Measured`,
#: noise at the outputs with the repairs and the name of its tensor behind this.
TIMES, VALUES, ARRIVING = "times", "values", "arriving: "


class Notes(Protocol):
    """Keeps what was measured."""

    def recall(self, key: str, kind: Kind[T]) -> tuple[bool, T | None]:
        """Whether something was written down under a key, and what, of a kind."""

    def remember(self, key: str, value: Any) -> None:
        """Write down what was measured: numbers, words, lists and dicts."""


class Notebook:
    """Keeps what was measured as long as it lives, for what needs no history."""

    def __init__(self) -> None:
        self._notes: dict[str, Any] = {}

    def recall(self, key: str, kind: Kind[T]) -> tuple[bool, T | None]:
        """Whether something was written down under a key, and what, of a kind."""
        return (True, kind(self._notes[key])) if key in self._notes else (False, None)

    def remember(self, key: str, value: Any) -> None:
        """Write down what was measured."""
        self._notes[key] = value

    @property
    def arriving(self) -> dict[str, dict[str, float]]:
        """See `Measured.arriving`."""
        return arriving_in(self._notes)


def arriving_in(notes: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Tensor or op → repairs → noise at the outputs, of all that was measured."""
    found: dict[str, dict[str, float]] = {}
    for key, noise in notes.items():
        if key.startswith(ARRIVING):
            repairs, _, name = key.removeprefix(ARRIVING).partition(": ")
            found.setdefault(name, {})[repairs] = at(key, number, noise)
    return found
