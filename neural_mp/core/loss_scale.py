"""Loss scaling against underflow of 16-bit gradients, for all frameworks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from neural_mp.errors import ArgumentValueError
from neural_mp.util.validators import (
    integer_between,
    is_finite,
    optional,
    positive_float,
    validate_option,
)

DYNAMIC = "dynamic"


@dataclass(frozen=True)
class LossScaleState:
    """State of loss scaling during training.

    Attributes:
        scale: factor of the loss and divisor of the gradients.
        good_steps: steps with finite gradients since the scale last changed.
        steps: steps that updated the weights.
        skipped_steps: steps skipped because of non-finite gradients.
        skipped_in_a_row: consecutive skipped steps up to now.
    """

    scale: float
    good_steps: int = 0
    steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class LossScale:
    """Schedule of the loss scale.

    The scale is divided by `factor` after every step with NaN or Inf gradients, and multiplied by
    `factor` after `growth_interval` finite steps. The scale never falls below `minimum`: a scale of
    0, reached after about 300 such steps without a minimum, turns the next finite gradients into
    NaN.

    Attributes:
        initial: initial scale.
        growth_interval: finite steps before an increase; None for a fixed scale.
        factor: factor of an increase or decrease.
        minimum, maximum: bounds of the scale. Real training runs need scales of 0.01.

    Raises:
        ConfigurationError: a number is out of bounds.
    """

    initial: float = 2.0**15
    growth_interval: int | None = 2000
    factor: float = 2.0
    minimum: float = 2.0**-14
    maximum: float = 2.0**24

    def __post_init__(self) -> None:
        for name in ("initial", "factor", "minimum", "maximum"):
            value = getattr(self, name)
            validate_option(f"loss scale: {name}", positive_float, value, ArgumentValueError)
        validate_option(
            "loss scale: growth_interval",
            optional(integer_between(1)),
            self.growth_interval,
            ArgumentValueError,
        )
        if self.factor <= 1:
            raise ArgumentValueError(f"loss scale: factor must be above 1, got {self.factor!r}")
        if not self.minimum <= self.initial <= self.maximum:
            raise ArgumentValueError(
                f"loss scale: initial must be between minimum {self.minimum:g} and maximum "
                f"{self.maximum:g}, got {self.initial:g}"
            )

    @classmethod
    def fixed(cls, value: float) -> LossScale:
        """Return a fixed scale; steps with non-finite gradients are still skipped.

        Raises:
            ConfigurationError: the scale is below 1, which lets more gradients underflow.
        """
        if is_finite(value) and 0 < value < 1:
            raise ArgumentValueError(
                f"a fixed loss scale must be at least 1, got {value:g}; pass 'dynamic' or a "
                f"LossScale, whose scale may fall below 1"
            )
        return cls(value, None, minimum=value, maximum=value)

    @classmethod
    def read(cls, given: Any) -> LossScale:
        """Parse a user's value: `"dynamic"`, a number (fixed scale), or a `LossScale`.

        Raises:
            ConfigurationError: the value is none of these.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given == DYNAMIC:
            return cls()
        if is_finite(given):
            return cls.fixed(float(given))
        raise ArgumentValueError(
            f"loss_scale must be {DYNAMIC!r}, a number or a LossScale, got {given!r}"
        )

    @property
    def is_fixed(self) -> bool:
        """Whether the scale never changes."""
        return self.growth_interval is None

    def start(self) -> LossScaleState:
        """Return the state before the first step."""
        return LossScaleState(self.initial)

    def after(self, state: LossScaleState, finite: bool) -> LossScaleState:
        """Return the state after a step; `finite`: whether all gradients were finite."""
        if not finite:
            scale = state.scale if self.is_fixed else max(state.scale / self.factor, self.minimum)
            skipped, in_a_row = state.skipped_steps + 1, state.skipped_in_a_row + 1
            return LossScaleState(scale, 0, state.steps, skipped, in_a_row)
        scale, good = state.scale, state.good_steps + 1
        if self.growth_interval is not None and good >= self.growth_interval:
            scale, good = min(scale * self.factor, self.maximum), 0
        return LossScaleState(scale, good, state.steps + 1, state.skipped_steps)
