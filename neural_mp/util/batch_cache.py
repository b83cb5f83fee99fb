"""Batches that can be read only once, kept in memory for the passes that come."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from neural_mp.errors import DataError
from neural_mp.util.memory import free_memory
from neural_mp.util.pytree import tree_leaves

#: The share of the free memory that may be taken.
_MAX_MEMORY_FRACTION = 0.5
_END = object()


class BatchCache:
    """The batches of an iterator, read when they are first asked for.

    Args:
        iterator: what can be walked only once.
        name: the option it was given as.
        most: how many are read; None for all.
    """

    def __init__(self, iterator: Iterator[Any], name: str, most: int | None = None) -> None:
        self.name = name
        self._iterator: Iterator[Any] | None = itertools.islice(iterator, most)
        self._kept: list[Any] = []
        self._room = _MemoryBudget(
            name,
            "Give a loader that can be read again, such as a function that makes the generator, or "
            "set max_batches (evaluation.accuracy.max_batches in YAML) if it does not end",
        )
        self._raised: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        place = 0
        while place < len(self._kept):
            yield self._kept[place]
            place += 1
        while (batch := self._read()) is not _END:
            yield batch
            place += 1
            while place < len(self._kept):  # another pass was here meanwhile
                yield self._kept[place]
                place += 1

    def __len__(self) -> int:
        """How many there are.

        Raises:
            TypeError: that is not known before all were read.
        """
        if self._iterator is not None:
            raise TypeError("the number of batches is not known before all were read")
        return len(self._kept)

    def __getstate__(self) -> dict[str, Any]:
        """All that a copy in another process needs: what was not read yet is read for it."""
        for _ in self:
            pass
        return self.__dict__

    def _read(self) -> Any:
        if self._raised is not None:
            raise self._raised
        if self._iterator is None:
            return _END
        try:
            batch = next(self._iterator, _END)
        except BaseException as error:
            # What comes after it is not known: no later pass may take what is kept for all.
            self._raised = error
            raise
        if batch is _END:
            self._iterator = None
            return _END
        try:
            self._room.take(batch)
        except DataError as error:
            self._raised = error
            self._kept.clear()
            raise
        self._kept.append(_copy(batch))
        return batch


def cache_items(items: Iterator[Any], name: str, mend: str) -> list[Any]:
    """All items of an iterator, if there is room for them.

    Args:
        items: what can be walked only once.
        name: what it is.
        mend: what to give in its place where there is no room.

    Raises:
        DataError: they take more than half of what is free.
    """
    room, found = _MemoryBudget(name, mend), []
    for item in items:
        room.take(item)
        found.append(item)
    return found


class _MemoryBudget:
    """The memory that what is kept may take."""

    def __init__(self, name: str, mend: str) -> None:
        self.name, self.mend = name, mend
        self._limit, self._taken, self._count = free_memory() * _MAX_MEMORY_FRACTION, 0, 0

    def take(self, value: object) -> None:
        self._taken += _size(value)
        self._count += 1
        if self._taken > self._limit:
            raise DataError(
                f"{self.name} can be read only once, so what it gives is kept in memory; the first "
                f"{self._count} take {self._taken >> 20} MiB, more than half of what was free. "
                f"{self.mend}"
            )


def _size(value: object) -> int:
    """Bytes that a batch takes."""
    return sum(
        int(getattr(leaf, "nbytes", 0) or sys.getsizeof(leaf)) for leaf in tree_leaves(value)
    )


def _copy(value: Any) -> Any:
    """A batch that does not change where the next one is put in the same place."""
    if type(value) in (tuple, list):
        return type(value)(_copy(item) for item in value)
    if type(value) is dict:
        return {key: _copy(item) for key, item in value.items()}
    if type(value) is np.ndarray:
        return value.copy()
    return value.clone() if hasattr(value, "detach") else value
