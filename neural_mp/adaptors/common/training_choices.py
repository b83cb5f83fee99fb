"""Losses and optimizers by name, as tuning files write them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from neural_mp.errors import DataError

#: Loss on class numbers or distributions over classes, in every framework.
CROSS_ENTROPY = "CrossEntropyLoss"
#: Loss on class numbers, in Keras.
SPARSE_CROSS_ENTROPY = "SparseCategoricalCrossentropy"
#: Loss on targets of 0 and 1, one for each output.
BINARY_CROSS_ENTROPY = "BinaryCrossentropy"
#: Loss on numbers, one for each output.
SQUARED_ERROR = "MeanSquaredError"
#: Losses that read one target for each output.
BY_OUTPUT = (BINARY_CROSS_ENTROPY, SQUARED_ERROR)
LOSSES = (CROSS_ENTROPY, SPARSE_CROSS_ENTROPY, *BY_OUTPUT)
#: Default number of passes over the batches.
EPOCHS = 10
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


def check_targets(targets: Sequence[int | None], outputs: Sequence[int | None]) -> None:
    """Check that targets of a shape, such as [n] for outputs [n, 1], can be those of outputs.

    A size of None is unknown.

    Raises:
        DataError: the numbers of samples or of values differ.
    """
    samples = {shape[0] for shape in (targets, outputs) if shape} - {None}
    rest = [[size for size in shape[1:] if size is not None] for shape in (targets, outputs)]
    are_known = None not in (*targets[1:], *outputs[1:])
    values = set(map(math.prod, rest)) if are_known else set()
    if len(samples) > 1 or len(values) > 1:
        raise DataError(
            f"targets must have one value for each output, got the shape {list(targets)} for "
            f"outputs of {list(outputs)}; set a loss in Python, or other targets"
        )


def are_class_numbers(targets: Sequence[int | None], outputs: Sequence[int | None]) -> bool:
    """Whether targets of a shape are class numbers, such as [n] or [n, 1] for outputs [n, 10]."""
    return len(targets) < len(outputs) or (targets[-1] == 1 and outputs[-1] != 1)


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
