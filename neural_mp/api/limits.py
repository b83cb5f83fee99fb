"""The limits of a tuning file on what ops of a model may run in."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from neural_mp.config import Settings
from neural_mp.config.source import Source
from neural_mp.core.words import Dialect
from neural_mp.errors import UnknownOperatorError
from neural_mp.space import Constraints, TuningSpace

_SECTIONS = ("quantization", "mixed_precision", "graph_optimization")


def constrained(space: TuningSpace, settings: Settings) -> tuple[TuningSpace, tuple[str, ...]]:
    """The space cut down by the limits of a file, and what there is to tell about them.

    Raises:
        UnknownOperatorError: a limit is for ops that the model does not have.
    """
    limits = settings.constraints
    told: list[str] = []
    with _placed(settings.source):
        if settings.dialect is Dialect.INC:
            for word, types in _their_types(space, limits).items():
                if not types:
                    told.append(f"optype_wise limits {word}; the model has no such op")
                by_type = dict.fromkeys(types, limits.optype_wise[word])
                space = space.constrained(Constraints(optype_wise=by_type))
            for pattern, limit in limits.op_wise.items():
                names = _begin_with(pattern, space)
                if not names:
                    told.append(f"op_wise limits {pattern!r}; no op of the model has such a name")
                space = space.constrained(Constraints(op_wise=dict.fromkeys(names, limit)))
            limits = replace(limits, optype_wise={}, op_wise={})
        return space.constrained(limits), tuple(told)


def _begin_with(pattern: str, space: TuningSpace) -> list[str]:
    """The ops whose names begin with a pattern: theirs need not fit the whole name."""
    try:
        found = re.compile(pattern)
    except re.error:
        found = re.compile(re.escape(pattern))
    return [op.name for op in space.graph if found.match(op.name)]


def _their_types(space: TuningSpace, limits: Constraints) -> dict[str, tuple[str, ...]]:
    """Their word → the op types of the model that it means; the word itself where it is unknown."""
    from neural_mp.compat.inc.op_types import in_words_of

    meant = {word: in_words_of(space.graph.types, word) for word in limits.optype_wise}
    return {word: (word,) if types is None else types for word, types in meant.items()}


@contextmanager
def _placed(source: Source) -> Iterator[None]:
    """Say where in the file the limit is that an error is about."""
    try:
        yield
    except UnknownOperatorError as error:
        written = (name for name in _SECTIONS if (name, *error.keys) in source.lines)
        with source.at((next(written, _SECTIONS[0]),)):
            raise
