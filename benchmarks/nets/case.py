"""A net and its data."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from torch import nn

Arrays = tuple[np.ndarray, ...]


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the model, in evaluation mode.
        draw: number, seed → samples.
        names: the inputs.
        batches: the batch sizes to time.
        judged: samples that outputs are compared on.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Arrays]
    names: tuple[str, ...] = ("image",)
    batches: tuple[int, ...] = (1, 8)
    judged: int = 32

    def cut(self, samples: int, seed: int, size: int) -> Iterator[Arrays]:
        """Yield samples in batches."""
        arrays = self.draw(samples, seed)
        for start in range(0, samples, size):
            yield tuple(array[start : start + size] for array in arrays)
