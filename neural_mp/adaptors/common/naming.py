"""Names for what is put into a graph beside what it holds already."""

from __future__ import annotations

from collections.abc import Container
from itertools import chain, count


def in_camel_case(kinds: str) -> dict[str, tuple[str, ...]]:
    """Kind → the op type that is the same word: `log_softmax` → `LogSoftmax`.

    Args:
        kinds: the kinds, with spaces between.
    """
    return {kind: ("".join(map(str.capitalize, kind.split("_"))),) for kind in kinds.split()}


def unique_name(name: str, taken: Container[str], first: int = 1) -> str:
    """The name, or the first of its numbered forms, from `first` on, that is not taken."""
    forms = chain([name], (f"{name}_{number}" for number in count(first)))
    return next(form for form in forms if form not in taken)
