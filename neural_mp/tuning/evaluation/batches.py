"""User data of any form as batches that can be read repeatedly, and their interpretation."""

from __future__ import annotations

import hashlib
import inspect
import itertools
import logging
import sys
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

from neural_mp.common import Batch, DataLoader
from neural_mp.errors import (
    ConversionError,
    DataError,
    NeuralMPError,
    is_users_own,
    mark_user_error,
    message_of,
)
from neural_mp.util.batch_cache import BatchCache
from neural_mp.util.fingerprint import DataDigest
from neural_mp.util.labels import get_batch_labels, split_at
from neural_mp.util.optional_packages import refuse_data_frame
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.system.watched_thread import watch_calls
from neural_mp.util.text import describe_value_shape, format_count, with_article
from neural_mp.util.user_calls import (
    UserCodeError,
    is_signature_mismatch,
    make_mismatch_message,
    unwrap_generator_error,
)

logger = logging.getLogger(__name__)

#: Number of batches in a fingerprint: distinguishes data, yet is quick to read.
_FINGERPRINTED = 32
_END = object()
#: Seconds of the first pass over a loader without length after which a message asks for its end.
_PATIENCE_SECONDS = 60.0
T = TypeVar("T")


@dataclass(frozen=True)
class FirstBatch:
    """The inputs of a loader's first batch, and the name of the loader."""

    inputs: Any
    name: str


class Batches:
    """A re-iterable view of a loader, dataset of batches, list, generator or generator function.

    Args:
        source: the user's data; a running generator is cached in memory, since it can be iterated
            only once.
        name: the option of the data, for error messages.
        most: maximum number of batches; None for all.
        label_key: key of the labels in batches that are dicts; None for the reserved names.

    Attributes:
        position: number of the latest batch, counted from 1; 0 before the first.
        raised: the exception that the user's code raised instead of a batch, or None.
        pass_length: number of batches in the latest complete pass; 0 before that.
        reading: interpretation of a batch, once determined; see `choose_reading`.

    Raises:
        DataError: the source is not iterable.
    """

    def __init__(
        self, source: Any, name: str, most: int | None = None, label_key: str | None = None
    ) -> None:
        self.name, self.most, self.label_key = name, most, label_key
        self.position = 0
        self.raised: BaseException | None = None
        self.pass_length = 0
        self.reading: Reading | None = None
        self._first_digest = ""
        self._is_noted = self._is_ended = False
        self._shuffled: bool | None = None
        refuse_data_frame(name, source)
        indexable = hasattr(source, "__getitem__") and hasattr(source, "__len__")
        walkable = isinstance(source, Iterable) or callable(source) or indexable
        if not walkable or isinstance(source, str | bytes | Mapping):
            raise DataError(
                f"{name} must be a dataloader, a list of batches or a generator function, "
                f"got {type(source).__name__}"
            )
        self._source = BatchCache(source, name, most) if isinstance(source, Iterator) else source
        self._first = self._given = None
        self._last: Callable[[], Any] = _empty_iterator_reference

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without process-local parts."""
        return {
            **self.__dict__,
            "_last": _empty_iterator_reference,
            "_given": None,
            "_first": None,
            "raised": None,
        }

    def __iter__(self) -> Iterator[Any]:
        yield from self._track_batches(self._limit_batches, 0)
        self.pass_length = self.position

    def _track_batches(self, produce: Callable[[], Iterable[Any]], offset: int) -> Iterator[Any]:
        self.position, started = offset, time.monotonic()
        batches = self._call_user(lambda: self._create_new_iterator(produce))
        self._is_ended = False
        while (batch := self._call_user(lambda: next(batches, _END))) is not _END:
            self.position += 1
            if self.label_key is not None:
                batch = split_at(self.label_key, batch)
            self._given = batch
            if self._first is None:
                self._first = batch
            if not (self._is_noted or self.pass_length):
                self._note_missing_end(time.monotonic() - started)
            yield batch
        self._is_ended = True
        if not self.position:
            earlier = f" ({self.pass_length} in the previous pass)" if self.pass_length else ""
            raise DataError(f"{self.name} must yield at least one batch, got none{earlier}")

    def _note_missing_end(self, seconds: float) -> None:
        """Log once that the first pass over a loader of unknown length takes long."""
        self._is_noted = seconds >= _PATIENCE_SECONDS
        if self._is_noted and self.most is None and not len(self):
            logger.warning(
                "%s has no length, and the first pass has read %s in %.0f s; if the loader has no "
                "end, set max_batches (evaluation.accuracy.max_batches in YAML)",
                self.name,
                format_count(self.position, "batch", "batches"),
                seconds,
            )

    @watch_calls(lambda local: local["self"].name)
    def _call_user(self, call: Callable[[], Any]) -> Any:
        """Run user code, and record the exception that it raises."""
        try:
            return call()
        except Exception as error:
            self.raised = mark_user_error(unwrap_generator_error(error))
            if isinstance(self.raised, StopIteration):  # generators cannot raise StopIteration
                raise UserCodeError(self.raised) from error
            raise

    def _create_new_iterator(self, produce: Callable[[], Iterable[Any]]) -> Iterator[Any]:
        """Return an iterator from the first batch; raise if the source continues the previous one.

        A loader with persistent workers returns one object in every pass, which starts again.
        """
        produced = produce()
        try:
            batches = iter(produced)
        except TypeError as error:
            if is_signature_mismatch(error, iter, produced):
                raise DataError(f"{self.name} cannot be iterated: {error}") from error
            raise
        if batches is not self._last():
            self._last = _make_weak_reference(batches)
            return batches
        first = next(batches, _END)
        if first is _END or not self._starts_with(first):
            raise DataError(
                f"{self.name} must return a new iterator in each pass, got the same "
                f"{type(batches).__name__} again; give a list, a loader, or a function that "
                f"returns a new {type(batches).__name__}"
            )
        return itertools.chain([first], batches)

    def _starts_with(self, batch: Any) -> bool:
        """Whether a batch of an iterator that was read before is the first of another pass."""
        if self._is_ended or getattr(self._source, "persistent_workers", False):
            return True
        if self.label_key is not None:
            batch = split_at(self.label_key, batch)
        return _digest_value(batch) == _digest_value(self._first)

    def _read_slice(self, part: slice) -> Iterator[Any]:
        """Yield a slice of the batches, if possible without reading the others."""

        def produce_slice() -> Iterable[Any]:
            batches = take_batch_slice(self._source, slice(part.start, stop))
            if batches is None:
                return itertools.islice(self._limit_batches(), part.start, stop)
            return batches

        stop = part.stop if self.most is None else min(self.most, part.stop or self.most)

        return self._track_batches(produce_slice, part.start or 0)

    def _limit_batches(self) -> Iterable[Any]:
        batches = self._get_source_iterable()
        return batches if self.most is None else itertools.islice(batches, self.most)

    def _get_source_iterable(self) -> Iterable[Any]:
        if callable(self._source) and not isinstance(self._source, Iterable):
            try:
                produced = self._source()
            except TypeError as error:
                if is_signature_mismatch(error, self._source):
                    raise DataError(
                        make_mismatch_message(error, self._source, f"{self.name}()")
                    ) from error
                raise
            if not isinstance(produced, Iterable):
                raise DataError(
                    f"the function {self.name} must return or yield batches, got "
                    f"{with_article(type(produced).__name__)}"
                )
            return produced
        if isinstance(self._source, Iterable):
            return self._source
        return (self._source[index] for index in range(self._count_batches()))

    def _count_batches(self) -> int:
        try:
            return len(self._source)
        except (TypeError, ValueError) as error:
            if error.__traceback__ is None or error.__traceback__.tb_next is None:
                raise DataError(
                    f"len({self.name}) must be a non-negative integer: {error}"
                ) from error
            raise

    def iterate_pairs(self, part: slice | None = None) -> Iterator[Batch]:
        """Yield the batches, or a slice of them, as `(inputs, labels)`.

        If a batch is a dict with labels, e.g. from a Hugging Face collator, its inputs are the
        whole dict: only the model can select the keys to feed.

        Raises:
            DataError: a batch holds no labels.
        """
        for batch in self if part is None else self._read_slice(part):
            yield make_labelled_pair(batch, self.name, self.label_key)

    @property
    def first_pair(self) -> Batch:
        """The first batch as `(inputs, labels)`."""
        batch = self._first if self._first is not None else self._first_batch
        return make_labelled_pair(batch, self.name, self.label_key)

    def iterate_inputs(self) -> Iterator[Any]:
        """Yield the inputs of every batch by `reading`, by default the first of a pair, or all."""
        for batch in self:
            yield inputs_of_batch(batch, self.reading)

    @cached_property
    def _first_batch(self) -> Any:
        return next(iter(self))

    @property
    def first_inputs(self) -> Any:
        """The inputs of the first batch, which is read once."""
        return require_batch_inputs(self._first_batch, self.reading, place_of(self.name, 1))

    @property
    def first_batch(self) -> FirstBatch:
        """The first batch, with the name of its loader."""
        return FirstBatch(self.first_inputs, self.name)

    def choose_reading(self, attempt: Callable[[FirstBatch], T], has_labels: bool = False) -> T:
        """Set `reading` to the first interpretation that the model accepts.

        `attempt` runs the model, whose signature decides, on the first batch; its result is
        returned. Batches that are known to hold labels have one interpretation.

        Raises:
            DataError: no interpretation fits; the error is that of the documented one.
        """
        refused: DataError | None = None
        for reading in list_batch_readings(self._first_batch, has_labels):
            self.reading = reading
            try:
                return attempt(self.first_batch)
            except DataError as error:
                if is_users_own(error):
                    raise
                refused = refused or error
        self.reading = None
        assert refused is not None
        raise refused

    @property
    def is_ambiguous(self) -> bool:
        """Whether a batch has several interpretations."""
        return len(list_batch_readings(self._first_batch)) > 1

    @property
    def assumption_notes(self) -> tuple[str, ...]:
        """Note on batches that are not interpreted as documented."""
        readings = list_batch_readings(self._first_batch)
        if self.reading in (None, readings[0]):
            return ()
        return (
            f"every batch of {self.name} was interpreted as {self.reading}, to match the inputs of "
            f"the model; the first batch is {describe_value_shape(self._first_batch)}",
        )

    @contextmanager
    def blame_batch(self, passed_on: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Add the batch and its loader to errors raised in this context, except `passed_on`.

        Raises:
            DataError: the model does not run on a batch.
        """
        try:
            yield
        except (DataError, ConversionError) as error:
            # Some runtimes report a failing op as a ConversionError, without the batch.
            if not is_users_own(error):
                name_loader(error, self.name, self.position)
            raise
        except Exception as error:
            # Frameworks raise arbitrary errors for mismatched inputs.
            passed = (NeuralMPError, UserCodeError, *passed_on)
            if isinstance(error, passed) or error is self.raised:
                raise
            raise DataError(
                f"the model does not run on {place_of(self.name, self.position)}"
                f"{self._describe_shapes()}: {type(error).__name__}: {message_of(error)}"
            ) from error

    def _describe_shapes(self) -> str:
        latest, first = (
            describe_value_shape(inputs_of_batch(batch, self.reading))
            for batch in (self._given, self._first)
        )
        if self._given is None:
            return ""
        return f" ({latest})" if latest == first else f" ({latest}; the first batch is {first})"

    def tried_on(self, model: Callable[[Any], Any]) -> Batches:
        """Return these batches after running a model on the first of them.

        Raises:
            DataError: the model does not run on the first batch.
        """

        def try_model(first: FirstBatch) -> None:
            with self.blame_batch():
                model(first.inputs)

        self.choose_reading(try_model)
        return self

    @watch_calls(lambda local: f"len({local['self'].name})")
    def __len__(self) -> int:
        try:
            count = len(self._source)
        except Exception:
            # User loaders may raise anything; only progress display depends on the length.
            logger.debug("Length of %s unknown", self.name, exc_info=True)
            return 0
        return count if self.most is None else min(count, self.most)

    @property
    def batch_count(self) -> int:
        """Number of batches in the latest complete pass, or the length; 0 if unknown."""
        return self.pass_length or len(self)

    @property
    def is_shuffled(self) -> bool:
        """Whether order or content of batches varies between passes, judged by the first batch."""
        if self._shuffled is None:
            self._first_digest = _digest_value(next(iter(self)))
            self._shuffled = self.first_batch_differs()
        return self._shuffled

    @property
    def drops_last(self) -> bool:
        """Whether the loader declares that it drops an incomplete last batch."""
        if isinstance(self._source, DataLoader):
            return self._source.last_batch == "discard"
        # PyTorch's loaders have this attribute.
        return inspect.getattr_static(self._source, "drop_last", None) is True

    def first_batch_differs(self) -> bool:
        """Whether the first batch differs from that of an earlier pass or another process."""
        return _digest_value(next(iter(self))) != self._first_digest

    def data_fingerprint(self) -> str:
        """Return a digest of the first batches and the length; of the length alone if shuffled."""
        batches = [_digest_value(batch) for batch in itertools.islice(iter(self), _FINGERPRINTED)]
        self._first_digest = batches[0]
        self._shuffled = self.first_batch_differs()
        if self._shuffled:
            return f"{len(self)}:shuffled"
        return f"{len(self)}:{hashlib.sha256(''.join(batches).encode()).hexdigest()[:16]}"


def _empty_iterator_reference() -> None:
    """Stand for the reference to a previous pass before the first one."""


def _make_weak_reference(batches: Iterator[Any]) -> Callable[[], Any]:
    """Return a weak reference to an iterator, or a strong one if not supported."""
    try:
        return weakref.ref(batches)
    except TypeError:
        return lambda: batches


def _digest_value(value: object) -> str:
    digest = DataDigest()
    digest.hash_values(value)
    return digest.hexdigest()[:16]


#: Names of Keras's indexable batch classes.
_KERAS_BATCHES = ("PyDataset", "Sequence")


def take_batch_slice(source: Any, part: slice) -> Iterable[Any] | None:
    """Return the batches of a slice; None if the loader can only be read from its start.

    The loader must have a reproducible order of batches; the slice may have no end.
    """
    if _is_indexed(source):
        return (source[index] for index in range(len(source))[part])
    # Subclasses with their own iterator may yield other batches.
    if isinstance(source, DataLoader) and type(source).__iter__ is DataLoader.__iter__:
        return source.part(part.start or 0, part.stop)
    return _slice_torch_loader(source, part)


def _is_indexed(source: object) -> bool:
    """Whether `source[i]` is the i-th batch."""
    if not (hasattr(source, "__getitem__") and hasattr(source, "__len__")):
        return False
    if isinstance(source, Sequence) or not isinstance(source, Iterable):
        return True
    return any(
        kind.__name__ in _KERAS_BATCHES and "keras" in kind.__module__
        for kind in type(source).__mro__
    )


def _slice_torch_loader(source: Any, part: slice) -> Iterable[Any] | None:
    torch: Any = sys.modules.get("torch")  # imported, if `source` is a loader
    if torch is None or type(source) is not torch.utils.data.DataLoader:
        return None
    walked = isinstance(source.dataset, torch.utils.data.IterableDataset)
    if walked or source.batch_sampler is None:
        return None
    loader: Iterable[Any] = torch.utils.data.DataLoader(
        source.dataset,
        batch_sampler=list(source.batch_sampler)[part],
        num_workers=source.num_workers,
        collate_fn=source.collate_fn,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context,
        generator=source.generator,
        prefetch_factor=source.prefetch_factor,
    )
    return loader


class Reading(StringEnum):
    """An interpretation of the batches of a loader."""

    PAIR = "a pair of inputs and labels"
    ALONE = "inputs without labels"
    LABELS_LAST = "inputs followed by labels"


def list_batch_readings(batch: object, has_labels: bool = False) -> tuple[Reading, ...]:
    """Return the possible interpretations of a batch, the documented one first.

    A batch that must hold labels has one interpretation.
    """
    if isinstance(batch, Mapping) or not isinstance(batch, tuple | list) or len(batch) < 2:
        return (Reading.ALONE,)
    if len(batch) == 2:
        return (Reading.PAIR,) if has_labels else (Reading.PAIR, Reading.ALONE)
    return (Reading.LABELS_LAST,) if has_labels else (Reading.ALONE, Reading.LABELS_LAST)


def inputs_of_batch(batch: Any, reading: Reading | None = None) -> Any:
    """Return the inputs of a batch by its interpretation, by default the documented one.

    A batch that does not match the interpretation counts as inputs alone.
    """
    readings = list_batch_readings(batch)
    if (reading or readings[0]) not in readings:
        return batch
    match reading or readings[0]:
        case Reading.PAIR:
            return batch[0]
        case Reading.LABELS_LAST:
            return batch[:-1]
    return batch


def require_batch_inputs(batch: object, reading: Reading | None, location: str) -> Any:
    """Return `inputs_of_batch`; `location` names the batch in the message.

    Raises:
        DataError: the inputs are None.
    """
    inputs = inputs_of_batch(batch, reading)
    if inputs is None:
        raise DataError(f"{location} must contain inputs, got None")
    return inputs


def make_labelled_pair(batch: Any, name: str, label_key: str | None) -> tuple[Any, Any]:
    """Return a batch as inputs and labels; the inputs of a dict are the whole dict.

    Args:
        batch: a pair, inputs followed by labels, or a dict that contains the labels.
        name: the loader, for the message.
        label_key: key of the labels in a dict; None for the reserved names.

    Raises:
        DataError: the batch holds no labels.
    """
    if isinstance(batch, Mapping):
        return batch, get_batch_labels(batch, name, label_key)
    if list_batch_readings(batch, has_labels=True) == (Reading.LABELS_LAST,):
        return batch[:-1], batch[-1]
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        description = describe_value_shape(batch)
        if hasattr(batch, "shape"):
            description = f"{with_article(type(batch).__name__)} alone, {description}"
        raise DataError(f"{name} must yield (inputs, labels), got {description}")
    return batch[0], batch[1]


def name_loader(error: NeuralMPError, name: str, position: int = 1) -> None:
    """Add the loader and the number of the batch to an error."""
    if name and name not in str(error):
        error.args = (f"{place_of(name, position)}: {error}",)


def place_of(name: str, position: int) -> str:
    """Return the loader and the number of a batch as text."""
    return f"batch {position} of {name}" if position else name
