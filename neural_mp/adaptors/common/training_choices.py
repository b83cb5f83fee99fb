"""Losses and optimizers by name, as tuning files write them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

#: Loss on class numbers or distributions over classes, in every framework.
CROSS_ENTROPY = "CrossEntropyLoss"
#: Loss on class numbers, in Keras.
SPARSE_CROSS_ENTROPY = "SparseCategoricalCrossentropy"
LOSSES = (CROSS_ENTROPY, SPARSE_CROSS_ENTROPY)
#: Reductions of a loss over the samples of a batch; `auto` and `sum_over_batch_size` are the mean.
REDUCTIONS = ("mean", "sum", "auto", "sum_over_batch_size")

_MOMENTS = ("beta_1", "beta_2", "epsilon", "amsgrad")
#: Optimizer → its options besides the learning rate.
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "SGD": ("momentum", "nesterov", "weight_decay"),
    "Adam": _MOMENTS,
    "AdamW": (*_MOMENTS, "weight_decay"),
}


@dataclass(frozen=True)
class LossChoice:
    """A loss by name.

    Attributes:
        name: one of `LOSSES`.
        reduction: one of `REDUCTIONS`.
        from_logits: whether outputs of a Keras model are logits; those of PyTorch always are.
    """

    name: str = CROSS_ENTROPY
    reduction: str = "mean"
    from_logits: bool = False

    @property
    def sums(self) -> bool:
        """Whether losses of samples are added; else their mean is taken."""
        return self.reduction == "sum"


@dataclass(frozen=True)
class OptimizerChoice:
    """An optimizer by name; the learning rate is that of the training.

    Weight decay applies to weights alone: it would pull learned scales back to the calibrated ones.

    Attributes:
        name: one of `OPTIMIZERS`.
        options: its options by the names of Keras; missing ones have the framework's defaults.
    """

    name: str = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def decays(self) -> bool:
        """Whether weights decay."""
        return bool(self.options.get("weight_decay"))
