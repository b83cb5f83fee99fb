"""What a value is, in words for messages: `float32[8, 10]`, `a tuple of int64[8] and None`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any


def counted(count: int, noun: str, plural: str = "") -> str:
    """A number with its noun: `1 evaluation`, `2 evaluations`.

    Args:
        count: how many there are.
        noun: for one.
        plural: for any other number; the noun with an s by default.
    """
    return f"{count} {noun if count == 1 else plural or noun + 's'}"


def with_article(noun: str) -> str:
    """A noun with `a` or `an`, by how its first letter is spoken: `an array`, `a tuple`."""
    word = noun.strip("'\"`")
    silent = word[:4].lower() in ("hour", "hone")
    like_you = word[:3].lower() in ("uni", "uin", "use", "uti", "one")
    # Names in capitals are spelled: an RMSE, an MSE, an F1, a URL, a BERT.
    spelled = len(word) > 1 and word[:2] == word[:2].upper() and word[0] in "FHLMNRSX"
    spelled = spelled or word[:2] == "nd"  # an ndarray: n-dimensional
    vowel = word[:1].lower() in tuple("aeiou")
    return f"{'an' if silent or spelled or (vowel and not like_you) else 'a'} {noun}"


#: Parts of a tuple or dict that are told one by one.
_MAX_LISTED = 4


def shape_words(value: object) -> str:
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


def _first(items: Iterable[object]) -> list[Any]:
    return list(items)[:_MAX_LISTED]
