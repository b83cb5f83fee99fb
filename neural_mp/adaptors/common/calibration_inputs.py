"""Calibration inputs, without samples whose NaN reaches the outputs.

NaN and Inf in inputs can be meant: a mask of -Inf, or missing values that the model replaces. The
outputs decide: a sample with NaN in its inputs that turns outputs into NaN is damaged.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from neural_mp.core.observations import NaNSamples
from neural_mp.errors import ConversionError, DataError
from neural_mp.util.pytree import (
    Array,
    batch_size_of,
    float_arrays,
    named_float_arrays,
    with_samples,
)


@dataclass
class CalibrationInputs:
    """An iterable of batches, in which damaged samples are replaced by others of their batch.

    Batches keep their shape; a batch of damaged samples alone is left out.

    Attributes:
        batches: the batches.
        run: the model, from the inputs of a batch to its outputs.
        number: number of the current batch, from 1.
        samples: number of samples in the batches so far, without the damaged ones.
        damaged: input → its samples that are damaged.
    """

    batches: Iterable[Any]
    run: Callable[[Any], Any]
    number: int = 0
    samples: int = 0
    damaged: dict[str, NaNSamples] = field(default_factory=dict)
    _current: Any = None
    _used: int = 0
    #: Numbers of the batches with non-finite tensors, and the first of these batches.
    _non_finite: set[int] = field(default_factory=set)
    _example: Any = None

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches, 1):
            self.number = number
            self._current = self._replace_damaged_samples(batch)
            if self._current is not None:
                self._used += 1
                yield self._current
        if self.damaged and not self._used:
            raise DataError(
                f"calibration data must hold samples without NaN, but NaN in input "
                f"{next(iter(self.damaged))!r} reaches the outputs of every sample; remove or "
                f"repair these samples"
            )

    def note_non_finite(self) -> None:
        """Note that a tensor holds NaN or Inf in the current batch."""
        if not self._non_finite:
            self._example = self._current
        self._non_finite.add(self.number)

    def check_outputs(self) -> None:
        """Check, if every batch has non-finite tensors, that outputs of the first are finite.

        Raises:
            ConversionError: no floating-point output is.
        """
        if not self._used or len(self._non_finite) < self._used:
            return
        outputs = [array for array in float_arrays(self.run(self._example)) if array.size]
        if outputs and not any(np.isfinite(array).any() for array in outputs):
            raise ConversionError(
                "outputs of the model must be finite on the calibration data, got only NaN or "
                "Inf; check the model and its inputs"
            )

    def _replace_damaged_samples(self, batch: Any) -> Any:
        """Return a batch without damaged samples; None if there are no others."""
        size = batch_size_of(batch)
        named = named_float_arrays(batch if isinstance(batch, Mapping | list | tuple) else [batch])
        marked = ((name, _samples_with_nan(array, size)) for name, array in named.items())
        nan = {name: damaged for name, damaged in marked if damaged.any()}
        if not nan or not any(np.isnan(array).any() for array in float_arrays(self.run(batch))):
            self.samples += size
            return batch
        for name, damaged in nan.items():
            first = self.damaged.get(name, NaNSamples(self.number, 0))
            self.damaged[name] = NaNSamples(first.batch, first.samples + int(damaged.sum()))
        is_whole = ~np.any(list(nan.values()), axis=0)
        self.samples += int(is_whole.sum())
        if not is_whole.any():
            return None
        chosen = np.where(is_whole, np.arange(size), np.argmax(is_whole))
        return with_samples(batch, chosen.tolist())


def _samples_with_nan(array: Array, size: int) -> Array:
    """Return for each of `size` samples whether an array holds NaN in it.

    An array with another first axis belongs to all samples.
    """
    nan = np.isnan(array)
    if array.ndim and len(array) == size:
        return np.asarray(nan.any(axis=tuple(range(1, nan.ndim))))
    return np.full(size, nan.any())
