"""Whatever a user gives as data, as batches that can be read again and again."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from neural_mp.common import Batch
from neural_mp.core.content import DataDigest
from neural_mp.core.grammar import with_article
from neural_mp.core.labels import labels_of
from neural_mp.core.nested import count_samples
from neural_mp.errors import DataError, NeuralMPError
from neural_mp.tuning.parts import part_of

#: Batches that go into a fingerprint: enough to tell data apart, few enough to be read quickly.
_FINGERPRINTED = 32
_END = object()


@dataclass(frozen=True)
class FirstBatch:
    """The inputs of a loader's first batch.

    Attributes:
        inputs: the inputs.
        name: of the loader.
    """

    inputs: Any
    name: str


def name_loader(error: DataError, name: str, position: int = 1) -> None:
    """Let an error about a batch say which batch of which loader it is."""
    if name and name not in str(error):
        error.args = (f"{_place(name, position)}: {error}",)


def _place(name: str, position: int) -> str:
    return f"batch {position} of {name}" if position else name


class Batches:
    """A dataloader of any kind: loader, dataset of batches, list, generator or generator function.

    Args:
        source: what the user gave; a generator that is already running is kept in memory, since
            it can be walked only once.
        name: the option it was given as, for error messages.

    Attributes:
        position: which batch was given last, counted from 1; 0 before the first.
        raised: what the user's own code raised instead of a batch; None if it did not.
        walked: how many batches there were when they were last walked to their end; 0 before that.

    Raises:
        DataError: it cannot be walked.
    """

    def __init__(self, source: Any, name: str) -> None:
        self.name = name
        self.position = 0
        self.raised: Exception | None = None
        self.walked = 0
        self._first_digest = ""
        self._shuffled: bool | None = None
        indexable = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        walkable = isinstance(source, Iterable) or callable(source) or indexable
        if not walkable or isinstance(source, str | bytes | Mapping):
            raise DataError(
                f"{name} must be a dataloader, a list of batches or a generator function, "
                f"got {type(source).__name__}"
            )
        self._source = list(source) if isinstance(source, Iterator) else source

    def __iter__(self) -> Iterator[Any]:
        yield from self._walk(self._produced, 0)
        self.walked = self.position

    def _walk(self, produce: Callable[[], Iterable[Any]], before: int) -> Iterator[Any]:
        """What is produced, with an eye on which batch that is."""
        self.position = before
        try:
            batches = iter(produce())
            while (batch := next(batches, _END)) is not _END:
                self.position += 1
                yield batch
        except Exception as error:
            self.raised = error
            raise
        if not self.position:
            raise DataError(f"{self.name} yields nothing; give at least one batch")

    def _part(self, part: slice) -> Iterator[Any]:
        """Some of the batches; the others are not read where there is a way around it."""

        def produce() -> Iterable[Any]:
            found = part_of(self._source, part)
            if found is None:
                return itertools.islice(self._produced(), part.start, part.stop)
            return found

        return self._walk(produce, part.start or 0)

    def _produced(self) -> Iterable[Any]:
        if callable(self._source) and not isinstance(self._source, Iterable):
            produced = self._source()
            if not isinstance(produced, Iterable):
                raise DataError(
                    f"{self.name} is a function that returns "
                    f"{with_article(type(produced).__name__)}; it must return or yield batches"
                )
            return produced
        if isinstance(self._source, Iterable):
            return self._source
        return (self._source[index] for index in range(len(self._source)))

    def pairs(self, part: slice | None = None) -> Iterator[Batch]:
        """The batches as `(inputs, labels)`.

        Of a dict with labels in it, such as a collator of Hugging Face gives, the inputs are the
        dict itself: only the model can tell which of it is to be fed.

        Args:
            part: which of them, counted from 0; None for all.

        Raises:
            DataError: a batch is no pair, and no dict with labels in it.
        """
        for batch in self if part is None else self._part(part):
            if isinstance(batch, Mapping):
                yield batch, labels_of(batch, self.name)
                continue
            if not isinstance(batch, tuple | list) or len(batch) != 2:
                size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
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

    @property
    def first(self) -> FirstBatch:
        """The same, with where they come from."""
        return FirstBatch(self.first_inputs, self.name)

    @contextmanager
    def blamed(self, passed_on: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Say of what goes wrong with a batch which batch it is, and of which loader.

        Args:
            passed_on: errors that are not about a batch, which come through as they are.

        Raises:
            DataError: the model does not run on a batch.
        """
        try:
            yield
        except DataError as error:
            name_loader(error, self.name, self.position)
            raise
        except Exception as error:
            # Whatever the framework says of inputs that do not fit.
            if isinstance(error, (NeuralMPError, *passed_on)) or error is self.raised:
                raise
            raise DataError(
                f"the model does not run on {_place(self.name, self.position)}: "
                f"{type(error).__name__}: {error}"
            ) from error

    def tried_on(self, model: Callable[[Any], Any]) -> Batches:
        """These batches, if a model runs on the first of them.

        Raises:
            DataError: it does not.
        """
        with self.blamed():
            model(self.first_inputs)
        return self

    def __len__(self) -> int:
        try:
            return len(self._source)
        except (TypeError, NotImplementedError):
            return 0

    @property
    def count(self) -> int:
        """How many there are, by what was walked or by their length; 0 where it is not known."""
        return self.walked or len(self)

    @property
    def shuffled(self) -> bool:
        """Whether they come in another order, or changed, each time; the first of them tells."""
        if self._shuffled is None:
            self._first_digest = _digest(next(iter(self)))
            self._shuffled = self.begin_otherwise()
        return self._shuffled

    def begin_otherwise(self) -> bool:
        """Whether the first batch is another one now, or here, than when it was first looked at."""
        return _digest(next(iter(self))) != self._first_digest

    def fingerprint(self) -> str:
        """A digest of the first batches and the length; of the length alone if it is shuffled."""
        batches = [_digest(batch) for batch in itertools.islice(iter(self), _FINGERPRINTED)]
        self._first_digest = batches[0]
        self._shuffled = self.begin_otherwise()
        if self._shuffled:
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
    digest = DataDigest()
    digest.feed(value)
    return digest.hexdigest()[:16]
