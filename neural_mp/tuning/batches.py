"""Whatever a user gives as data, as batches that can be read again and again."""

from __future__ import annotations

import hashlib
import itertools
import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from neural_mp.common import Batch
from neural_mp.errors import DataError, NeuralMPError, is_users_own, mark_user_error, message_of
from neural_mp.tuning.batch_reading import Reading, inputs_of_batch, readings_of
from neural_mp.tuning.batch_slicing import part_of
from neural_mp.util.batch_cache import BatchCache
from neural_mp.util.digest import DataDigest
from neural_mp.util.labels import labels_of
from neural_mp.util.text import shape_words, with_article
from neural_mp.util.user_calls import UserCodeError, as_raised, is_signature_mismatch, misfit_words

logger = logging.getLogger(__name__)

#: Batches that go into a fingerprint: enough to tell data apart, few enough to be read quickly.
_FINGERPRINTED = 32
_END = object()
T = TypeVar("T")


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
        most: how many of them there are to be; None for all.

    Attributes:
        position: which batch was given last, counted from 1; 0 before the first.
        raised: what the user's own code raised instead of a batch; None if it did not.
        walked: how many batches there were when they were last walked to their end; 0 before that.
        reading: how a batch is read, where that was found out; see `bound`.

    Raises:
        DataError: it cannot be walked.
    """

    def __init__(self, source: Any, name: str, most: int | None = None) -> None:
        self.name, self.most = name, most
        self.position = 0
        self.raised: BaseException | None = None
        self.walked = 0
        self.reading: Reading | None = None
        self._first_digest = ""
        self._shuffled: bool | None = None
        indexable = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        walkable = isinstance(source, Iterable) or callable(source) or indexable
        if not walkable or isinstance(source, str | bytes | Mapping):
            raise DataError(
                f"{name} must be a dataloader, a list of batches or a generator function, "
                f"got {type(source).__name__}"
            )
        self._source = BatchCache(source, name, most) if isinstance(source, Iterator) else source
        self._first = self._given = None
        self._last: Callable[[], Any] = _nothing

    def __getstate__(self) -> dict[str, Any]:
        """All but what is of this process alone."""
        return {**self.__dict__, "_last": _nothing, "_given": None, "_first": None, "raised": None}

    def __iter__(self) -> Iterator[Any]:
        yield from self._walk(self._produced, 0)
        self.walked = self.position

    def _walk(self, produce: Callable[[], Iterable[Any]], before: int) -> Iterator[Any]:
        """What is produced, with an eye on which batch that is."""
        self.position = before
        batches = self._users(lambda: self._begun(produce))
        while (batch := self._users(lambda: next(batches, _END))) is not _END:
            self.position += 1
            self._given = batch
            if self._first is None:
                self._first = batch
            yield batch
        if not self.position:
            earlier = f" now, but gave {self.walked} the last time" if self.walked else ""
            raise DataError(f"{self.name} yields nothing{earlier}; give at least one batch")

    def _users(self, call: Callable[[], Any]) -> Any:
        """What the user's own code gives; what it raises is remembered as theirs."""
        try:
            return call()
        except Exception as error:
            self.raised = mark_user_error(as_raised(error))
            if isinstance(self.raised, StopIteration):  # no generator lets it out
                raise UserCodeError(self.raised) from error
            raise

    def _begun(self, produce: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """An iterator over what is produced, which must be another one each time."""
        produced = produce()
        try:
            batches = iter(produced)
        except TypeError as error:
            if is_signature_mismatch(error, iter, produced):
                raise DataError(f"{self.name} cannot be walked: {error}") from error
            raise
        if batches is self._last():
            raise DataError(
                f"{self.name} gives the same {type(batches).__name__} each time it is walked, and "
                f"that can be read only once; give a list, a loader, or a function that makes the "
                f"{type(batches).__name__} anew"
            )
        self._last = _reference(batches)
        return batches

    def _part(self, part: slice) -> Iterator[Any]:
        """Some of the batches; the others are not read where there is a way around it."""

        def produce() -> Iterable[Any]:
            found = part_of(self._source, slice(part.start, stop))
            if found is None:
                return itertools.islice(self._produced(), part.start, stop)
            return found

        stop = part.stop if self.most is None else min(self.most, part.stop or self.most)

        return self._walk(produce, part.start or 0)

    def _produced(self) -> Iterable[Any]:
        found = self._all()
        return found if self.most is None else itertools.islice(found, self.most)

    def _all(self) -> Iterable[Any]:
        if callable(self._source) and not isinstance(self._source, Iterable):
            try:
                produced = self._source()
            except TypeError as error:
                if is_signature_mismatch(error, self._source):
                    raise DataError(misfit_words(error, self._source, f"{self.name}()")) from error
                raise
            if not isinstance(produced, Iterable):
                raise DataError(
                    f"{self.name} is a function that returns "
                    f"{with_article(type(produced).__name__)}; it must return or yield batches"
                )
            return produced
        if isinstance(self._source, Iterable):
            return self._source
        return (self._source[index] for index in range(self._length()))

    def _length(self) -> int:
        """How many batches there are to be read by their number.

        Raises:
            DataError: the length is no whole number from 0.
        """
        try:
            return len(self._source)
        except (TypeError, ValueError) as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise DataError(f"len({self.name}) is no whole number from 0: {error}") from error
            raise

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
                raise DataError(f"{self.name} must yield (inputs, labels), got {_told(batch)}")
            yield batch[0], batch[1]

    def inputs(self) -> Iterator[Any]:
        """The inputs of every batch, by `reading`; else the first of a pair, or all of it."""
        for batch in self:
            yield inputs_of_batch(batch, self.reading)

    @cached_property
    def _first_batch(self) -> Any:
        return next(iter(self))

    @property
    def first_inputs(self) -> Any:
        """The inputs of the first batch, which is read once."""
        return inputs_of_batch(self._first_batch, self.reading)

    @property
    def first(self) -> FirstBatch:
        """The same, with where they come from."""
        return FirstBatch(self.first_inputs, self.name)

    def bound(self, attempt: Callable[[FirstBatch], T]) -> T:
        """Find out how batches are to be read: in the first way in which a model takes them.

        Args:
            attempt: gives the inputs of the first batch to the model, whose signature decides.

        Returns:
            What the attempt returned that went well.

        Raises:
            DataError: the model takes the batch in no way; the error is of the documented one.
        """
        refused: DataError | None = None
        for reading in readings_of(self._first_batch):
            self.reading = reading
            try:
                return attempt(self.first)
            except DataError as error:
                if is_users_own(error):
                    raise
                refused = refused or error
        self.reading = None
        assert refused is not None
        raise refused

    @property
    def ambiguous(self) -> bool:
        """Whether a batch can be read in several ways."""
        return len(readings_of(self._first_batch)) > 1

    @property
    def assumed(self) -> tuple[str, ...]:
        """The note on a batch that is not read in the documented way."""
        known = readings_of(self._first_batch)
        if self.reading in (None, known[0]):
            return ()
        return (
            f"every batch of {self.name} was read as {self.reading}, as the inputs that the model "
            f"takes call for: {shape_words(self._first_batch)}",
        )

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
            if not is_users_own(error):
                name_loader(error, self.name, self.position)
            raise
        except Exception as error:
            # Whatever the framework says of inputs that do not fit.
            passed = (NeuralMPError, UserCodeError, *passed_on)
            if isinstance(error, passed) or error is self.raised:
                raise
            raise DataError(
                f"the model does not run on {_place(self.name, self.position)}{self._sizes()}: "
                f"{type(error).__name__}: {message_of(error)}"
            ) from error

    def _sizes(self) -> str:
        """What the batch that was given last holds, beside the first one where they differ."""
        found, first = (
            shape_words(inputs_of_batch(batch, self.reading))
            for batch in (self._given, self._first)
        )
        if self._given is None:
            return ""
        return f" ({found})" if found == first else f" ({found}; the first is {first})"

    def tried_on(self, model: Callable[[Any], Any]) -> Batches:
        """These batches, if a model runs on the first of them.

        Raises:
            DataError: it does not.
        """

        def attempt(first: FirstBatch) -> None:
            with self.blamed():
                model(first.inputs)

        self.bound(attempt)
        return self

    def __len__(self) -> int:
        try:
            found = len(self._source)
        except Exception:
            # Whatever the user's loader raises: nothing but progress depends on its length.
            logger.debug("the length of %s is not known", self.name, exc_info=True)
            return 0
        return found if self.most is None else min(found, self.most)

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


def _told(batch: object) -> str:
    words = shape_words(batch)
    if not hasattr(batch, "shape"):
        return words
    return f"{with_article(type(batch).__name__)} alone, {words}"


def _nothing() -> None:
    """There was no pass yet."""


def _reference(batches: Iterator[Any]) -> Callable[[], Any]:
    """What gives an iterator as long as somebody else has it; some cannot be let go."""
    try:
        return weakref.ref(batches)
    except TypeError:
        return lambda: batches


def _digest(value: object) -> str:
    digest = DataDigest()
    digest.feed(value)
    return digest.hexdigest()[:16]
