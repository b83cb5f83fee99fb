"""Calibration batches up to a number of samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

from neural_mp.tuning.evaluation.batches import Batches
from neural_mp.util.pytree import batch_size_of


@dataclass(frozen=True)
class Calibration:
    """Calibration batches that hold a number of samples.

    Attributes:
        batches: all batches.
        samples: number of samples; the last batch is not truncated.
        seed: seed that draws the batches; None for the first batches.
    """

    batches: Batches
    samples: int = 100
    seed: int | None = None

    def iterate_inputs(self, before_each: Callable[[], None] = lambda: None) -> Iterator[Any]:
        """Yield the inputs of the batches that hold these samples."""
        # Drawn before the pass: loaders need not support two passes at a time.
        if "_drawn" not in vars(self):
            vars(self)["_drawn"] = self._draw_batches(before_each)
        drawn = self._drawn_batches
        batches = enumerate(self.batches.iterate_inputs())
        chosen = (inputs for i, inputs in batches if drawn is None or i in drawn)
        yield from limit_samples(chosen, self.samples, before_each)

    @cached_property
    def _drawn_batches(self) -> frozenset[int] | None:
        return self._draw_batches(lambda: None)

    def _draw_batches(self, before_each: Callable[[], None]) -> frozenset[int] | None:
        """Return the numbers of the drawn batches; None for the first batches."""
        if self.seed is None:
            return None
        sizes = []
        for inputs in self.batches.iterate_inputs():
            before_each()
            sizes.append(batch_size_of(inputs))
        order = random.Random(self.seed).sample(range(len(sizes)), len(sizes))
        before = accumulate((sizes[i] for i in order), initial=0)
        return frozenset(i for i, held in zip(order, before, strict=False) if held < self.samples)

    @property
    def batch_count(self) -> int:
        """Number of required batches; estimated from the first one, unless drawn."""
        if self._drawn_batches is not None:
            return len(self._drawn_batches)
        total = -(-self.samples // max(1, batch_size_of(self.batches.first_inputs)))
        return min(total, len(self.batches)) if len(self.batches) else total


def sample_words(samples: int, seed: int | None) -> str:
    """Return the number of samples with their seed, for fingerprints."""
    return str(samples) if seed is None else f"{samples} (seed {seed})"


def limit_samples(
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
