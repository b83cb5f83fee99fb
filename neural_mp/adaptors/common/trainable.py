"""The framework-independent interface of models for training advice."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from neural_mp.core.training_numerics import ModelTrace


@dataclass(frozen=True)
class TrainedLayer:
    """A layer whose precision can be set to 16 bits independently.

    Attributes:
        name, kind: the name of the layer and its class.
        fixed: the reason to stay in float32; empty if there is none.
    """

    name: str
    kind: str
    fixed: str = ""


@dataclass(frozen=True)
class Gradients:
    """Gradients of a loss for all weights, divided by the loss scale: float32 arrays."""

    loss: float
    arrays: Sequence[np.ndarray]

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return bool(np.isfinite(self.loss)) and all(np.isfinite(a).all() for a in self.arrays)

    def noise_against(self, reference: Gradients) -> float:
        """Return the NSR ‖g − r‖² / ‖r‖² against reference gradients r; infinite if not finite."""
        if not self.is_finite:
            return float("inf")
        pairs = zip(self.arrays, reference.arrays, strict=True)
        error = sum(float(np.square(g.astype(np.float64) - r).sum()) for g, r in pairs)
        signal = sum(float(np.square(r, dtype=np.float64).sum()) for r in reference.arrays)
        if signal == 0:
            return 0.0 if error == 0 else float("inf")
        return error / signal


class TrainableModel(Protocol):
    """A model trained in float32 that also computes gradients with some layers in 16 bits."""

    @property
    def layers(self) -> Sequence[TrainedLayer]:
        """The layers, in the model's order."""

    def gradients(
        self, batch: object, low: Collection[str], scale: float, *, singly: bool = False
    ) -> Gradients:
        """Return the gradients of a batch, without dropout.

        Args:
            batch: inputs and targets.
            low: the layers in 16 bits; all others stay in float32.
            scale: the loss scale.
            singly: whether each layer is treated in isolation: its inputs are in 16 bits, too,
                whatever their origin.

        Returns:
            The gradients; a loss of NaN and no arrays if the model does not run in 16 bits.
        """

    def trace(self, batch: object, low: Collection[str], scale: float) -> ModelTrace:
        """Return the numerics trace of such a pass with `singly`."""

    def step(self, batch: object) -> float:
        """Run one training step in float32 and return the loss before the step."""
