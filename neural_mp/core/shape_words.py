"""What a value is, in words for messages: `float32[8, 10]`, `a tuple of int64[8] and None`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from neural_mp.core.grammar import counted, with_article

#: Parts of a tuple or dict that are told one by one.
_MOST = 4


def shape_words(value: Any) -> str:
    """The element type and shape of an array; the parts of what holds several; else the type."""
    if value is None:
        return "None"
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        try:
            sizes = ", ".join(map(str, value.shape))
        except (TypeError, ValueError):  # TensorFlow: the rank is not known
            sizes = "?"
        return f"{str(value.dtype).rpartition('.')[2]}[{sizes}]"
    name = type(value).__name__
    if isinstance(value, Mapping):
        parts = [f"{key!r}: {shape_words(item)}" for key, item in _first(value.items())]
        return f"{with_article(name)} of {len(value)} ({', '.join(parts)})"
    if isinstance(value, tuple | list):
        if value and all(isinstance(item, int | float | str) for item in value):
            kind = type(value[0]).__name__
            return f"{with_article(name)} of {counted(len(value), kind)}"
        parts = [shape_words(item) for item in _first(value)]
        return f"{with_article(name)} of {len(value)} ({', '.join(parts)})"
    return with_article(name)


def _first(items: Any) -> list[Any]:
    return list(items)[:_MOST]
