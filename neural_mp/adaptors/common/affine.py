"""Scalings and shifts after a layer, combined to be folded into its constants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import Array


@dataclass
class Affine:
    """scale · x + shift per channel, in float64 so that a chain rounds once."""

    scale: NDArray[np.float64]
    shift: NDArray[np.float64]

    @classmethod
    def identity(cls, channels: int) -> Affine:
        """Return the identity map."""
        return cls(np.ones(channels), np.zeros(channels))

    def then_scale(self, factor: Array) -> None:
        """Multiply the channels by `factor`."""
        self.scale, self.shift = self.scale * factor, self.shift * factor

    def then_add(self, value: Array) -> None:
        """Add `value` to the channels."""
        self.shift = self.shift + value

    def then_normalize(self, parameters: Sequence[Array | None], epsilon: float) -> None:
        """Apply a batch norm in inference mode: `parameters` are scale, shift, mean, variance."""
        scale, shift, mean, variance = (
            None if value is None else value.astype(np.float64) for value in parameters
        )
        assert mean is not None
        assert variance is not None
        self.then_add(-mean)
        self.then_scale((1.0 if scale is None else scale) / np.sqrt(variance + epsilon))
        if shift is not None:
            self.then_add(shift)
