"""Digests of data: equal for equal values, dtypes and shapes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np

T = TypeVar("T")

#: Distinguishes equal data split into different batch sizes.
_END_OF_BATCH = "end of batch"


class DataDigest:
    """Incremental digest of data.

    Attributes:
        complete: whether all data could be read as numbers, strings or bytes; only then do equal
            digests mean equal data.
    """

    def __init__(self) -> None:
        self._digest = hashlib.sha256()
        self.complete = True

    def hexdigest(self) -> str:
        """Return the current digest as 64 hexadecimal digits."""
        return self._digest.hexdigest()

    def feed(self, value: object) -> None:
        """Hash arrays, tensors, numbers, strings, and mappings and sequences of these."""
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


class DigestingIterator:
    """Computes the digest of data that are iterated for another purpose."""

    def __init__(self) -> None:
        self._running = DataDigest()
        self._ended = False

    def wrap(self, batches: Iterable[T]) -> Iterator[T]:
        """Yield the batches unchanged and hash them, starting over."""
        self._running, self._ended = DataDigest(), False
        for batch in batches:
            self._running.feed(batch)
            self._running.feed(_END_OF_BATCH)
            yield batch
        self._ended = True

    def __reduce__(self) -> tuple[type[DigestingIterator], tuple[()]]:
        return DigestingIterator, ()  # copies start empty

    @property
    def digest(self) -> str | None:
        """The digest of all batches; None if not read to the end, or not all hashable."""
        return self._running.hexdigest() if self._ended and self._running.complete else None


def digest_of(value: object) -> str | None:
    """Return the digest of data; None if any part is neither numbers, strings nor bytes."""
    digest = DataDigest()
    digest.feed(value)
    return digest.hexdigest() if digest.complete else None
