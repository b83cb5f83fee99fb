"""Names of ops and tensors that are inserted into a graph."""

from __future__ import annotations

from collections.abc import Container, Iterable
from itertools import chain, count


def unique_name(name: str, used: Container[str], first: int = 1) -> str:
    """Return the name, or its first numbered variant from `first` on, that is not taken."""
    variants = chain([name], (f"{name}_{number}" for number in count(first)))
    return next(variant for variant in variants if variant not in used)


def reserve_name(name: str, used: set[str], first: int = 1) -> str:
    """Return the result of `unique_name`, and add it to the names that are taken."""
    unique = unique_name(name, used, first)
    used.add(unique)
    return unique


class UniqueNames:
    """Names that are taken; a repeated name takes its next number without a search from the first.

    Args:
        used: names that are taken from the start.
    """

    def __init__(self, used: Iterable[str] = ()) -> None:
        self._used = set(used)
        self._numbers: dict[str, int] = {}

    def reserve(self, name: str) -> str:
        """Return and take the name, or its first numbered variant that is not taken."""
        if name not in self._used:
            self._used.add(name)
            return name
        number = self._numbers.get(name, 1)
        while f"{name}_{number}" in self._used:
            number += 1
        self._numbers[name] = number + 1
        self._used.add(f"{name}_{number}")
        return f"{name}_{number}"

    def give_up(self, name: str) -> None:
        """Release a name."""
        self._used.discard(name)
        self._numbers.clear()  # the name may be a variant of another


def find_source_op(name: str, known: Container[str]) -> str | None:
    """Return the op of the source that an op of another runtime comes from; None if unknown.

    Ops that an op was split into have its name, a slash and one word. Longer names are made up for
    ops that an exporter left without a name.
    """
    if name in known:
        return name
    parent, _, _ = name.rpartition("/")
    return parent if parent in known else None
