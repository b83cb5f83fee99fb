"""Digests of data: equal for the same values, types and shapes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Tells batches apart that hold the same values in batches of other sizes.
_END_OF_BATCH = "end of batch"


class DataDigest:
    """A digest of data that grows with every value.

    Attributes:
        complete: whether all that it was fed could be read as numbers, words or bytes; only then
            are two data with the same digest the same.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.complete = True

    def hexdigest(self) -> str:
        """The digest so far, as 64 hexadecimal digits."""
        return self._digest.hexdigest()

    def feed(self, value: Any) -> None:
        """Take in arrays, tensors, numbers, words, and mappings and sequences of these."""
        if isinstance(value, Mapping):
            for key in value:
                self._digest.update(str(key).encode())
                self.feed(value[key])
        elif isinstance(value, tuple | list):
            for item in value:
                self.feed(item)
        else:
            try:
                self._feed_array(np.asarray(value))
            except (TypeError, ValueError, RuntimeError, AttributeError, pickle.PickleError):
                self._digest.update(repr(type(value)).encode())
                self.complete = False

    def _feed_array(self, array: np.ndarray[Any, Any]) -> None:
        self._digest.update(f"{array.dtype}{array.shape}".encode())
        if array.dtype == object:
            self._digest.update(pickle.dumps(array.tolist()))
        else:
            self._digest.update(array.tobytes())


class Witness:
    """Watches data that are read for another purpose, and tells their digest afterwards."""

    def __init__(self) -> None:
        self._running = DataDigest()
        self._ended = False

    def watch(self, batches: Iterable[T]) -> Iterator[T]:
        """The same batches; what was watched before counts no more."""
        self._running, self._ended = DataDigest(), False
        for batch in batches:
            self._running.feed(batch)
            self._running.feed(_END_OF_BATCH)
            yield batch
        self._ended = True

    def __reduce__(self) -> tuple[type[Witness], tuple[()]]:
        return Witness, ()  # a copy begins anew

    @property
    def digest(self) -> str | None:
        """The digest of all batches; None where they were not read to their end, or not told."""
        return self._running.hexdigest() if self._ended and self._running.complete else None


def digest_of(value: Any) -> str | None:
    """The digest of data; None where something in it is neither numbers, words nor bytes."""
    found = DataDigest()
    found.feed(value)
    return found.hexdigest() if found.complete else None
