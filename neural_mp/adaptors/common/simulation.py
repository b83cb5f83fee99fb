"""Training of a model with the rounding of a plan: schedule, and the part of an adaptor."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from neural_mp.adaptors.common.training_choices import LossChoice, OptimizerChoice
from neural_mp.core.observations import Range
from neural_mp.errors import DataError
from neural_mp.space import ResolvedPlan
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

    def observes(self, step: int) -> bool:
        """Whether ranges follow the data in a step, counted from 0."""
        return step < self.observe_steps

    def trains_norms(self, step: int) -> bool:
        """Whether folded batch norms use the statistics of the batch in a step, counted from 0."""
        return step < self.norm_steps


#: Share of a new batch in the moving average of a range.
RANGE_MOMENTUM = 0.1


def moving_range(known: Range, observed: Range) -> Range:
    """Return the moving average of a range after a batch."""
    low, high = (
        (1 - RANGE_MOMENTUM) * old + RANGE_MOMENTUM * new
        for old, new in zip(known, observed, strict=True)
    )
    return min(low, 0.0), max(high, 0.0)


def gradient_factor(values: int, largest: int) -> float:
    """Return the factor of a scale's gradient in LSQ, section 2.2."""
    return 1 / math.sqrt(max(values, 1) * largest)


#: Least power that self-distillation divides the error of an output by.
LEAST_POWER = 1e-12


def inputs_and_targets(batch: Any, has_loss: bool) -> tuple[Any, Any]:
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


class Trainer(Protocol):
    """Training steps of one simulation."""

    def step(self, batch: Any, learning_rate: float) -> float:
        """Run one step and return the loss before the step.

        NaN if a number of the pass or a gradient is not finite; the weights then stay.
        """

    def first_non_finite(self, batch: Any) -> str | None:
        """Return the place of the first NaN or Inf of a batch; None if all numbers are finite."""

    def state(self) -> bytes:
        """Return weights, scales, optimizer and random state."""

    def load(self, state: bytes, *, resume: bool = False) -> None:
        """Restore a result of `state`; the random state only with `resume`.

        Raises:
            ConfigurationError: the state is damaged or of another model.
        """


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
    """

    simulated: Callable[[M, M, ResolvedPlan, Mapping[str, Range], TrainingSchedule], Any]
    trainer: Callable[[Any, Callable[[Any, Any], Any] | None, OptimizerChoice], Trainer]
    finished: Callable[[Any], M]
    loss: Callable[[LossChoice], Callable[[Any, Any], Any]]
