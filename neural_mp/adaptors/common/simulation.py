"""Training of a model with the rounding of a plan: schedule, losses and optimizers by name."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from neural_mp.core.observations import Range
from neural_mp.errors import DataError
from neural_mp.space import ResolvedPlan
from neural_mp.util.pytree import Array
from neural_mp.util.validators import boolean, non_negative_integer, validate_option

M = TypeVar("M")


@dataclass(frozen=True)
class TrainingSchedule:
    """Schedule of scales and batch norms over the training steps.

    A step is one call of the model in training mode.

    Attributes:
        observe_steps: number of first steps in which the ranges of activations follow the data and
            the scales of weights follow the weights; frozen or learned afterwards.
        learn_scales: whether the optimizer learns the scales.
        norm_steps: number of first steps in which batch norms that were folded into layers use the
            statistics of the batch; afterwards their running statistics, as in the converted model.
    """

    observe_steps: int = 0
    learn_scales: bool = True
    norm_steps: int = 0

    def __post_init__(self) -> None:
        validate_option("observe_steps", non_negative_integer, self.observe_steps)
        validate_option("learn_scales", boolean, self.learn_scales)
        validate_option("norm_steps", non_negative_integer, self.norm_steps)


#: Share of a new batch in the moving average of a range.
RANGE_MOMENTUM = 0.1


def update_moving_range(known: Range, observed: Range) -> Range:
    """Return the moving average of a range after a batch."""
    low, high = (
        (1 - RANGE_MOMENTUM) * old + RANGE_MOMENTUM * new
        for old, new in zip(known, observed, strict=True)
    )
    return min(low, 0.0), max(high, 0.0)


def lsq_gradient_factor(values: int, largest: int) -> float:
    """Return the factor of a scale's gradient in LSQ, section 2.2."""
    return 1 / math.sqrt(max(values, 1) * largest)


#: Least power that self-distillation divides the error of an output by.
LEAST_POWER = 1e-12


def inputs_and_targets(batch: object, has_loss: bool) -> tuple[Any, Any]:
    """Return the parts of a batch; without a loss, the batch is the inputs, and has no targets.

    Raises:
        DataError: a batch for a loss is not a pair.
    """
    if not has_loss:
        return batch, None
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise DataError(
            f"a batch for training with a loss must be (inputs, targets), got a "
            f"{type(batch).__name__}"
        )
    return batch[0], batch[1]


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
    def sums_losses(self) -> bool:
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


class Trainer(Protocol):
    """Training steps of one simulation."""

    def step(self, batch: object, learning_rate: float) -> float:
        """Run one step and return the loss before the step.

        NaN if a number of the pass or a gradient is not finite; the weights then stay.
        """

    def first_non_finite(self, batch: object) -> str | None:
        """Return the place of the first NaN or Inf of a batch; None if all numbers are finite."""

    def save_state(self) -> bytes:
        """Return weights, scales, optimizer and random state."""

    def load_state(self, state: bytes, *, resume: bool = False) -> None:
        """Restore a result of `state`; the random state only with `resume`.

        Raises:
            ConfigurationError: the state is damaged or of another model.
        """


@dataclass(frozen=True)
class TrainedModel(Generic[M]):
    """A trained model in float, with the quantization that its simulation computes.

    Attributes:
        model: the model with the trained weights, not rounded.
        ranges: quantized tensor → the range of its scale.
        weight_scales: op with an INT8 weight → the scale of each output channel.
    """

    model: M
    ranges: Mapping[str, Range]
    weight_scales: Mapping[str, Array]


@dataclass(frozen=True)
class Simulation(Generic[M]):
    """Simulation of integer kernels in float, for training.

    Attributes:
        simulated: the given FP32 model; the same with the corrections of a plan, resolved plan and
            ranges of quantized tensors, as in `Adaptor.convert_graph`; schedule → an object of the
            framework that can be trained and computes as the converted model does.
            `ConfigurationError` if it has no weight to train.
        trainer: such an object, loss, optimizer → its training steps. A loss is a function of
            outputs and targets, in the framework's order; without one, outputs are trained towards
            those of the FP32 model.
        finished: such an object → the converted model with its weights and scales.
        loss: a loss by name → such a function.
        trained: such an object → the trained model for another runtime; None without.
    """

    simulated: Callable[[M, M, ResolvedPlan, Mapping[str, Range], TrainingSchedule], Any]
    trainer: Callable[[Any, Callable[[Any, Any], Any] | None, OptimizerChoice], Trainer]
    finished: Callable[[Any], M]
    loss: Callable[[LossChoice], Callable[[Any, Any], Any]]
    trained: Callable[[Any], TrainedModel[M]] | None = None
