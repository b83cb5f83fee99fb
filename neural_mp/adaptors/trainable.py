"""What advice on training needs of a model, whatever framework it is of.

The package `training.gradients` of an adaptor has `opened(model, batch, loss, precision,
optimizer)`, a context manager that gives a `Trainee` and leaves the model as it was.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from neural_mp.core.numerics_trace import ModelTrace


@dataclass(frozen=True)
class TrainedLayer:
    """A layer that can be put into 16 bits, or kept out, by itself.

    Attributes:
        name, kind: what it is called, and its class.
        fixed: why it must stay in float32; empty where it need not.
    """

    name: str
    kind: str
    fixed: str = ""


@dataclass(frozen=True)
class Gradients:
    """The gradients of a loss for all weights, divided by the loss scale: float32 arrays."""

    loss: float
    arrays: Sequence[np.ndarray]

    @property
    def finite(self) -> bool:
        """Whether the loss and all gradients are finite."""
        return bool(np.isfinite(self.loss)) and all(np.isfinite(a).all() for a in self.arrays)

    def noise(self, reference: Gradients) -> float:
        """‖g − r‖² / ‖r‖² against the gradients r of a reference; infinite if not finite."""
        if not self.finite:
            return float("inf")
        pairs = zip(self.arrays, reference.arrays, strict=True)
        error = sum(float(np.square(g.astype(np.float64) - r).sum()) for g, r in pairs)
        signal = sum(float(np.square(r, dtype=np.float64).sum()) for r in reference.arrays)
        if signal == 0:
            return 0.0 if error == 0 else float("inf")
        return error / signal


class TrainableModel(Protocol):
    """A model that is trained in float32, and shows its gradients with some layers in 16 bits."""

    @property
    def layers(self) -> Sequence[TrainedLayer]:
        """The layers, in the model's order."""

    def gradients(
        self, batch: object, low: Collection[str], scale: float, *, singly: bool = False
    ) -> Gradients:
        """The gradients of a batch, without dropout.

        Args:
            batch: inputs and targets.
            low: the layers in 16 bits; all others are in float32.
            scale: what the loss is multiplied by.
            singly: whether each of them is looked at for itself: what it reads is in 16 bits, too,
                whatever it comes from.

        Returns:
            The gradients; a loss of NaN and none where the model does not run in 16 bits.
        """

    def seen(self, batch: object, low: Collection[str], scale: float) -> ModelTrace:
        """The same pass, singly, as it went through the layers."""

    def step(self, batch: object) -> float:
        """One step of training in float32; the loss before it."""
