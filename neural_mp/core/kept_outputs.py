"""Outputs of the FP32 model on calibration batches, kept for comparisons."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from neural_mp.util.digest import digest_of
from neural_mp.util.pytree import Array

#: Maximum bytes of all kept outputs.
MAX_KEPT_BYTES = 32 << 20


@dataclass
class KeptOutputs:
    """Floating-point outputs by the content of their batch, until they exceed a size.

    Attributes:
        limit: maximum bytes.
    """

    limit: int = MAX_KEPT_BYTES
    _size: int = 0
    _parts: list[list[Array]] = field(default_factory=list)
    _kept: dict[str, list[Array]] = field(default_factory=dict)

    @property
    def is_open(self) -> bool:
        """Whether further outputs are wanted."""
        return self._size < self.limit

    def add(self, outputs: list[Array]) -> None:
        """Keep the outputs of the next part of a batch: consecutive samples on the first axis."""
        self._size += sum(array.nbytes for array in outputs)
        self._parts.append(outputs)

    def end_batch(self, inputs: object) -> None:
        """Join the parts of a batch."""
        parts, self._parts = self._parts, []
        digest = digest_of(inputs) if self.is_open and parts else None
        if digest is not None:
            whole = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
            self._kept[digest] = parts[0] if len(parts) == 1 else list(whole)

    def of(self, inputs: object) -> list[Array] | None:
        """Return the outputs of a batch with these values; None if they were not kept."""
        digest = digest_of(inputs) if self._kept else None
        return None if digest is None else self._kept.get(digest)
