"""What kinds of op are called by frameworks whose op types are words in camel case."""

from __future__ import annotations


def in_camel_case(kinds: str) -> dict[str, tuple[str, ...]]:
    """Kind → the op type that is the same word: `log_softmax` → `LogSoftmax`.

    Args:
        kinds: the kinds, with spaces between.
    """
    return {kind: ("".join(map(str.capitalize, kind.split("_"))),) for kind in kinds.split()}
