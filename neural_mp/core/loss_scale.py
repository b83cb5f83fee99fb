"""How a loss is scaled, so that small gradients do not vanish in 16 bits: one rule for all."""

from __future__ import annotations

import math
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

from neural_mp.errors import ConfigurationError

DYNAMIC = "dynamic"


@dataclass(frozen=True)
class LossScaleState:
    """Where a training stands.

    Attributes:
        scale: what the loss is multiplied by, and the gradients are divided by.
        good_steps: steps with finite gradients since the scale last changed.
        steps: steps that changed the weights.
        skipped_steps: steps whose gradients were not finite, which changed no weight.
        skipped_in_a_row: how many of the last steps were skipped, one after the other.
    """

    scale: float
    good_steps: int = 0
    steps: int = 0
    skipped_steps: int = 0
    skipped_in_a_row: int = 0


@dataclass(frozen=True)
class LossScale:
    """By what a loss is multiplied, and how that changes while a model is trained.

    The scale falls by `factor` with every step whose gradients hold NaN or Inf, and rises by it
    after `growth_interval` finite steps. It never falls below `minimum`: a scale of 0, which
    others reach after some 300 such steps, makes NaN of the next good gradients.

    Attributes:
        initial: the scale to begin with.
        growth_interval: finite steps after which the scale rises; None for a scale that stays.
        factor: how much it rises and falls at a time.
        minimum, maximum: between which it stays. Real trainings need scales of 0.01.

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
            if not _is_number(value) or not math.isfinite(value) or value <= 0:
                raise ConfigurationError(
                    f"loss scale: {name} must be a finite number above 0, got {value!r}"
                )
        if self.factor <= 1:
            raise ConfigurationError(f"loss scale: factor must be above 1, got {self.factor!r}")
        interval = self.growth_interval
        whole = isinstance(interval, Integral) and not isinstance(interval, bool)
        if interval is not None and not (whole and interval >= 1):
            raise ConfigurationError(
                f"loss scale: growth_interval must be a whole number of steps, 1 or more, or None "
                f"for a scale that stays; got {interval!r}"
            )
        if not self.minimum <= self.initial <= self.maximum:
            raise ConfigurationError(
                f"loss scale: initial is {self.initial:g}, and must lie between minimum "
                f"{self.minimum:g} and maximum {self.maximum:g}"
            )

    @classmethod
    def fixed(cls, value: float) -> LossScale:
        """A scale that stays; steps whose gradients are not finite are skipped all the same."""
        return cls(value, None, minimum=value, maximum=value)

    @classmethod
    def read(cls, given: Any) -> LossScale:
        """What a user may give: `"dynamic"`, a number, which stays, or a `LossScale`.

        Raises:
            ConfigurationError: it is none of these.
        """
        if isinstance(given, cls):
            return given
        if isinstance(given, str) and given == DYNAMIC:
            return cls()
        if _is_number(given):
            return cls.fixed(float(given))
        raise ConfigurationError(
            f"loss_scale must be {DYNAMIC!r}, a number or a LossScale, got {given!r}"
        )

    @property
    def is_fixed(self) -> bool:
        """Whether the scale stays as it is."""
        return self.growth_interval is None

    def start(self) -> LossScaleState:
        """The state before the first step."""
        return LossScaleState(self.initial)

    def after(self, state: LossScaleState, finite: bool) -> LossScaleState:
        """The state after one more step.

        Args:
            state: the state before it.
            finite: whether all gradients were finite.
        """
        if not finite:
            scale = state.scale if self.is_fixed else max(state.scale / self.factor, self.minimum)
            skipped, in_a_row = state.skipped_steps + 1, state.skipped_in_a_row + 1
            return LossScaleState(scale, 0, state.steps, skipped, in_a_row)
        scale, good = state.scale, state.good_steps + 1
        if self.growth_interval is not None and good >= self.growth_interval:
            scale, good = min(scale * self.factor, self.maximum), 0
        return LossScaleState(scale, good, state.steps + 1, state.skipped_steps)


def _is_number(value: object) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)
