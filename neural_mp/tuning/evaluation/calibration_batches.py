"""Calibration batches up to a number of samples."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.pytree import batch_size_of


@dataclass(frozen=True)
class Calibration:
    """The first `samples` samples of calibration batches."""

    batches: Batches
    samples: int = 100

    def inputs(self, before_each: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """Yield the inputs of the batches that hold these samples."""
        return limited(self.batches.inputs(), self.samples, before_each)

    @property
    def count(self) -> int:
        """Number of required batches, estimated from the first one."""
        total = -(-self.samples // max(1, batch_size_of(self.batches.first_inputs)))
        return min(total, len(self.batches)) if len(self.batches) else total


def limited(
    batches: Iterable[Any], samples: int, before_each: Callable[[], None] = lambda: None
) -> Iterator[Any]:
    """Yield batches until they hold `samples` samples; the last batch is not truncated."""
    count = 0
    for inputs in batches:
        if count >= samples:
            return
        before_each()
        yield inputs
        count += batch_size_of(inputs)
