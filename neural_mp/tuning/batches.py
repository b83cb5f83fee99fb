"""Whatever a user gives as data, as batches that can be read again and again."""

from __future__ import annotations

import hashlib
import itertools
import pickle
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from neural_mp.common import Batch
from neural_mp.core.grammar import with_article
from neural_mp.core.nested import count_samples
from neural_mp.errors import DataError

#: Batches that go into a fingerprint: enough to tell data apart, few enough to be read quickly.
_FINGERPRINTED = 32


class Batches:
    """A dataloader of any kind: loader, dataset of batches, list, generator or generator function.

    Args:
        source: what the user gave; a generator that is already running is kept in memory, since
            it can be walked only once.
        name: the option it was given as, for error messages.

    Raises:
        DataError: it cannot be walked.
    """

    def __init__(self, source: Any, name: str) -> None:
        self.name = name
        indexable = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        walkable = isinstance(source, Iterable) or callable(source) or indexable
        if not walkable or isinstance(source, str | bytes | Mapping):
            raise DataError(
                f"{name} must be a dataloader, a list of batches or a generator function, "
                f"got {type(source).__name__}"
            )
        self._source = list(source) if isinstance(source, Iterator) else source

    def __iter__(self) -> Iterator[Any]:
        if callable(self._source) and not isinstance(self._source, Iterable):
            produced = self._source()
            if not isinstance(produced, Iterable):
                raise DataError(
                    f"{self.name} is a function that returns "
                    f"{with_article(type(produced).__name__)}; it must return or yield batches"
                )
        elif isinstance(self._source, Iterable):
            produced = self._source
        else:
            produced = (self._source[index] for index in range(len(self._source)))
        empty = True
        for batch in produced:
            empty = False
            yield batch
        if empty:
            raise DataError(f"{self.name} yields nothing; give at least one batch")

    def pairs(self) -> Iterator[Batch]:
        """The batches as `(inputs, labels)`.

        Raises:
            DataError: a batch is no pair.
        """
        for batch in self:
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, tuple | list | dict) else ""
                raise DataError(
                    f"{self.name} must yield (inputs, labels), got "
                    f"{with_article(type(batch).__name__)}{size}"
                )
            yield batch[0], batch[1]

    def inputs(self) -> Iterator[Any]:
        """The inputs of every batch: the first of a pair, else the batch itself."""
        for batch in self:
            yield batch[0] if isinstance(batch, tuple | list) and len(batch) == 2 else batch

    @cached_property
    def first_inputs(self) -> Any:
        """The inputs of the first batch, read once."""
        return next(self.inputs())

    def __len__(self) -> int:
        try:
            return len(self._source)
        except (TypeError, NotImplementedError):
            return 0

    def fingerprint(self) -> str:
        """A digest of the first batches and the length; of the length alone if it is shuffled."""
        batches = [_digest(batch) for batch in itertools.islice(iter(self), _FINGERPRINTED)]
        if _digest(next(iter(self))) != batches[0]:
            return f"{len(self)}:shuffled"
        return f"{len(self)}:{hashlib.sha256(''.join(batches).encode()).hexdigest()[:16]}"


@dataclass(frozen=True)
class Calibration:
    """Data to calibrate with.

    Attributes:
        batches: where it comes from.
        samples: how many samples of it are used.
    """

    batches: Batches
    samples: int = 100

    def inputs(self, before_each: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """The inputs of the batches that hold these samples."""
        return limited(self.batches.inputs(), self.samples, before_each)

    @property
    def count(self) -> int:
        """How many batches that are, as far as the first of them tells."""
        total = -(-self.samples // max(1, count_samples(self.batches.first_inputs)))
        return min(total, len(self.batches)) if len(self.batches) else total


def limited(
    batches: Iterable[Any], samples: int, before_each: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """Batches until `samples` samples were seen; the batch that reaches them is given whole."""
    seen = 0
    for inputs in batches:
        if seen >= samples:
            return
        before_each()
        yield inputs
        seen += count_samples(inputs)


def _digest(value: Any) -> str:
    digest = hashlib.sha256()
    _feed(digest, value)
    return digest.hexdigest()[:16]


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, Mapping):
        for key in value:
            digest.update(str(key).encode())
            _feed(digest, value[key])
    elif isinstance(value, tuple | list):
        for item in value:
            _feed(digest, item)
    else:
        try:
            array = np.asarray(value)
            digest.update(f"{array.dtype}{array.shape}".encode())
            digest.update(
                pickle.dumps(array.tolist()) if array.dtype == object else array.tobytes()
            )
        except (TypeError, ValueError, RuntimeError):
            digest.update(repr(type(value)).encode())
