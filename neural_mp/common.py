"""Framework-independent interfaces and classes: datasets, data loaders and metrics."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from neural_mp.errors import DataError
from neural_mp.util.batch_cache import cache_items
from neural_mp.util.optional_packages import refuse_data_frame
from neural_mp.util.user_calls import is_signature_mismatch, make_mismatch_message
from neural_mp.util.validators import integer_between, seed_number, validate_option

Batch = tuple[Any, Any]


@runtime_checkable
class Dataset(Protocol):
    """Indexable samples: `dataset[i]` is `(inputs, label)`, `len(dataset)` counts the samples."""

    def __getitem__(self, index: int) -> Any: ...

    def __len__(self) -> int: ...


@runtime_checkable
class Metric(Protocol):
    """Accumulates predictions batch by batch.

    Predictions have the type of the inputs: numpy arrays for numpy inputs, framework tensors for
    framework tensors. Labels are passed on as the data loader yields them.

    If the attribute `running` is True, `result` is also called during an evaluation, so that an
    evaluation that will miss the target can be stopped.

    If the attribute `compare_label` is False, the metric needs no labels: `labels` is the
    prediction of the FP32 model, before any postprocessing (as is `preds`); or both are after it,
    if `postprocess` has the attribute `applies_to_reference`, which is True.

    A method `merge(other)` adds the state of a second metric of the class after the metric's own;
    workers can then share an evaluation.
    """

    # Any: a user's metric may narrow these types and still satisfies the protocol.
    def update(self, preds: Any, labels: Any) -> None:
        """Add a batch."""

    def reset(self) -> None:
        """Clear all state."""

    def result(self) -> float:
        """Return the value over all batches since the last reset."""


def can_merge(metric: object) -> bool:
    """Whether a metric has a `merge` that covers all of its state.

    A subclass that overrides an accumulating method of a built-in metric must override `merge`,
    too.
    """
    if not callable(getattr(metric, "merge", None)):
        return False
    overridden = False
    for kind in type(metric).__mro__:
        ours = kind.__module__.partition(".")[0] == __name__.partition(".")[0]
        if "merge" in vars(kind):
            return not (ours and overridden)
        overridden |= not ours and not {"update", "reset", "result"}.isdisjoint(vars(kind))
    return True


def stack(samples: Sequence[Any]) -> Any:
    """Stack samples as numpy arrays along a new first axis, inside tuples, lists and dicts too."""
    first = samples[0]
    if isinstance(first, Mapping):
        return {key: stack([sample[key] for sample in samples]) for key in first}
    if isinstance(first, tuple | list):
        lengths = sorted({len(sample) for sample in samples})
        if len(lengths) > 1:
            raise DataError(
                f"the lists in stacked samples must have equal lengths, got "
                f"{', '.join(map(str, lengths[:4]))}; set batch_size to 1 or pass a collate_fn"
            )
        return tuple(stack([sample[i] for sample in samples]) for i in range(len(first)))
    arrays = [np.asarray(sample) for sample in samples]
    shapes = sorted({array.shape for array in arrays})
    if len(shapes) > 1:
        raise DataError(
            f"stacked samples must have equal shapes, got {', '.join(map(str, shapes[:4]))}; "
            f"pass a collate_fn that pads the samples"
        )
    return np.stack(arrays)


class DataLoader:
    """Batches of a dataset, for any framework.

    Args:
        dataset: anything with `__getitem__` and `__len__`, or any iterable of `(inputs, label)`. An
            iterator, which can be read only once, is read into memory.
        batch_size: samples per batch.
        collate_fn: list of samples → batch; default: stack with numpy.
        shuffle: shuffle the samples before every pass; equal seeds yield equal sequences of orders.
            Requires `__getitem__` and `__len__`.
        last_batch: for a smaller last batch, `"rollover"` keeps and `"discard"` drops the batch.
        seed: random seed of `shuffle`.

    Raises:
        DataError: an argument is out of range or the dataset is not iterable.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = False,
        last_batch: str = "rollover",
        seed: int = 0,
    ) -> None:
        refuse_data_frame("dataset", dataset)
        self._indexable = hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__")
        if not self._indexable and not isinstance(dataset, Iterable):
            raise DataError(
                f"dataset must have __getitem__ and __len__, or be iterable, got "
                f"{type(dataset).__name__}"
            )
        batch_size = validate_option("batch_size", integer_between(1), batch_size, DataError)
        if isinstance(seed, int):
            validate_option("seed", seed_number, seed, DataError)
        if collate_fn is not None and not callable(collate_fn):
            raise DataError(f"collate_fn must be a function, got {type(collate_fn).__name__}")
        if last_batch not in ("rollover", "discard"):
            raise DataError(f"last_batch must be 'rollover' or 'discard', got {last_batch!r}")
        if shuffle and not self._indexable:
            raise DataError(
                f"shuffle requires a dataset with __getitem__ and __len__, got "
                f"{type(dataset).__name__}"
            )
        if isinstance(dataset, Iterator):
            fix = "pass a dataset with __getitem__ and __len__, or an iterable that can be reread"
            dataset, self._indexable = cache_items(dataset, "the dataset", fix), True
        self.dataset = dataset
        self.batch_size = batch_size
        self.collate_fn = collate_fn or stack
        self.shuffle = shuffle
        self.last_batch = last_batch
        self._random = np.random.default_rng(seed)

    def __len__(self) -> int:
        if not self._indexable:
            raise TypeError("a loader over an iterable has no length")
        batches = len(self.dataset) / self.batch_size
        return math.floor(batches) if self.last_batch == "discard" else math.ceil(batches)

    def __iter__(self) -> Iterator[Any]:
        return self._collate_batches(self._iterate_samples())

    def part(self, start: int, stop: int | None = None) -> Iterator[Any]:
        """Iterate over some of the batches, reading only their samples if possible."""
        if not self._indexable or self.shuffle:
            return itertools.islice(iter(self), start, stop)
        end = None if stop is None else stop * self.batch_size
        indices = range(len(self.dataset))[start * self.batch_size : end]
        return self._collate_batches(self.dataset[index] for index in indices)

    def _collate_batches(self, items: Iterable[Any]) -> Iterator[Any]:
        samples: list[Any] = []
        for sample in items:
            samples.append(sample)
            if len(samples) == self.batch_size:
                yield self._collate_samples(samples)
                samples = []
        if samples and self.last_batch == "rollover":
            yield self._collate_samples(samples)

    def _collate_samples(self, samples: list[Any]) -> Any:
        try:
            return self.collate_fn(samples)
        except TypeError as error:
            if is_signature_mismatch(error, self.collate_fn, samples):
                message = make_mismatch_message(error, self.collate_fn, "collate_fn(samples)")
                raise DataError(message) from error
            raise

    def _iterate_samples(self) -> Iterator[Any]:
        if not self._indexable:
            yield from self.dataset
            return
        order = np.arange(len(self.dataset))
        if self.shuffle:
            self._random.shuffle(order)
        for index in order:
            yield self.dataset[int(index)]
