"""In-memory cache of batches that can be read only once."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

from neural_mp.errors import DataError
from neural_mp.util.pytree import tree_leaves
from neural_mp.util.system.memory import free_memory

#: Maximum fraction of the free memory.
_MAX_MEMORY_FRACTION = 0.5
_END = object()


class BatchCache:
    """The batches of an iterator, read on first access.

    Args:
        iterator: batches.
        name: name of the option with the iterator.
        most: maximum number of batches; None for all.
    """

    def __init__(self, iterator: Iterator[Any], name: str, most: int | None = None) -> None:
        self.name = name
        self._iterator: Iterator[Any] | None = itertools.islice(iterator, most)
        self._kept: list[Any] = []
        self._budget = _MemoryBudget(
            name,
            "pass a loader that can be read again, e.g. a function that returns the generator, or, "
            "for an endless loader, set max_batches (evaluation.accuracy.max_batches in YAML)",
        )
        self._raised: BaseException | None = None

    def __iter__(self) -> Iterator[Any]:
        position = 0
        while position < len(self._kept):
            yield self._kept[position]
            position += 1
        while (batch := self._read_next_batch()) is not _END:
            yield batch
            position += 1
            while position < len(self._kept):  # read by a concurrent pass
                yield self._kept[position]
                position += 1

    def __len__(self) -> int:
        """Return the number of batches.

        Raises:
            TypeError: not all batches were read yet.
        """
        if self._iterator is not None:
            raise TypeError("the number of batches is unknown until all batches were read")
        return len(self._kept)

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, after reading all batches."""
        for _ in self:
            pass
        return self.__dict__

    def _read_next_batch(self) -> Any:
        if self._raised is not None:
            raise self._raised
        if self._iterator is None:
            return _END
        try:
            batch = next(self._iterator, _END)
        except BaseException as error:
            # The rest is unknown: later passes must not take the cached part for all.
            self._raised = error
            raise
        if batch is _END:
            self._iterator = None
            return _END
        try:
            self._budget.charge_value(batch)
        except DataError as error:
            self._raised = error
            self._kept.clear()
            raise
        self._kept.append(copy_batch(batch))
        return batch


def cache_items(items: Iterator[Any], name: str, fix: str) -> list[Any]:
    """Return all items of an iterator, if the memory suffices.

    Raises:
        DataError: the items exceed half of the free memory; the message ends with `fix`.
    """
    budget, cached = _MemoryBudget(name, fix), []
    for item in items:
        budget.charge_value(item)
        cached.append(item)
    return cached


class _MemoryBudget:
    def __init__(self, name: str, fix: str) -> None:
        self.name, self.fix = name, fix
        self._limit, self._taken, self._count = free_memory() * _MAX_MEMORY_FRACTION, 0, 0

    def charge_value(self, value: object) -> None:
        self._taken += count_batch_bytes(value)
        self._count += 1
        if self._taken > self._limit:
            raise DataError(
                f"{self.name} can be read only once and is cached in memory, but the first "
                f"{self._count} items take {self._taken >> 20} MiB and exceed the limit of "
                f"{int(self._limit) >> 20} MiB, half of the free memory; {self.fix}"
            )


def count_batch_bytes(value: object) -> int:
    """Return the bytes of the arrays and other leaves of a batch."""
    return sum(
        int(getattr(leaf, "nbytes", 0) or sys.getsizeof(leaf)) for leaf in tree_leaves(value)
    )


def copy_batch(value: Any) -> Any:
    """Copy a batch, since loaders may reuse its memory for the next."""
    if type(value) in (tuple, list):
        return type(value)(copy_batch(item) for item in value)
    if type(value) is dict:
        return {key: copy_batch(item) for key, item in value.items()}
    if type(value) is np.ndarray:
        return value.copy()
    return value.clone() if hasattr(value, "detach") else value
