"""Accuracy criterion and limits of a search."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import MOST_SECONDS, integer_between, preview, validate_option

#: Relative tolerances from here on are rejected as percentages instead of fractions.
_TOO_LARGE_A_SHARE = 0.5
#: Larger integers have no float.
_LARGEST = 1e300
#: Default minimum speed-up over FP32, beyond measurement noise.
MIN_SPEEDUP = 1.03
#: Upper bound of the minimum speed-up.
_MAX_SPEEDUP = 1000.0


@dataclass(frozen=True)
class AccuracyCriterion:
    """The accuracy loss that is tolerated compared with FP32.

    Attributes:
        tolerance: the tolerated loss: a fraction of the baseline (0.01 is one percent) if
            `relative`, else in units of the metric.
        relative: whether the tolerance is relative to the baseline.
        higher_is_better: False for errors and losses; None uses the direction of the metric (or
            `eval_func`), by default True.
        any_tolerance: whether negative tolerances (the model must be better than FP32 by that
            amount) and fractions from one half on are accepted.

    Raises:
        ConfigurationError: the tolerance is not a number; or is negative or a fraction from one
            half on, without `any_tolerance`.
    """

    tolerance: float = 0.01
    relative: bool = True
    higher_is_better: bool | None = None
    any_tolerance: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.tolerance, int | float) or not abs(self.tolerance) < _LARGEST:
            raise ConfigurationError(
                f"accuracy_criterion: the tolerance must be a number, got {preview(self.tolerance)}"
            )
        for name, kind in (("relative", bool), ("higher_is_better", bool | None)):
            if not isinstance(getattr(self, name), kind):
                raise ConfigurationError(
                    f"accuracy_criterion: {name} must be True or False, got {getattr(self, name)!r}"
                )
        if not self.any_tolerance:
            self._check_range()

    def _check_range(self) -> None:
        if self.tolerance < 0:
            raise ConfigurationError(
                f"accuracy_criterion: the tolerance cannot be negative, got {self.tolerance}"
            )
        if self.relative and self.tolerance >= _TOO_LARGE_A_SHARE:
            raise ConfigurationError(
                f"accuracy_criterion: relative: {self.tolerance:g} tolerates losing "
                f"{self.tolerance * 100:g} % of the baseline; did you mean "
                f"{self.tolerance / 100:g} ({self.tolerance:g} %)? So large a loss can be "
                f"tolerated only as an amount: absolute in YAML, relative=False in Python"
            )

    @property
    def prefers_higher(self) -> bool:
        """Whether larger values are better; True by default."""
        return self.higher_is_better is not False

    def loss(self, baseline: float, accuracy: float) -> float:
        """Return the loss of `accuracy`, as a fraction of the baseline if relative.

        For a baseline of zero, the loss is absolute.
        """
        worse = baseline - accuracy if self.prefers_higher else accuracy - baseline
        return worse / abs(baseline) if self.relative and baseline != 0 else worse

    def met(self, baseline: float, accuracy: float) -> bool:
        """Whether `accuracy` is within tolerance; NaN never is."""
        # 10⁻⁹ covers rounding of e.g. 0.99 · baseline.
        return self.loss(baseline, accuracy) <= self.tolerance + 1e-9

    def target(self, baseline: float) -> float:
        """Return the worst accuracy within tolerance."""
        allowed = self.tolerance * (abs(baseline) if self.relative and baseline != 0 else 1.0)
        return baseline - allowed if self.prefers_higher else baseline + allowed

    def __str__(self) -> str:
        kind = (
            f"{self.tolerance:.4g} relative" if self.relative else f"{self.tolerance:.4g} absolute"
        )
        return f"{kind}, {'higher' if self.prefers_higher else 'lower'} is better"


@dataclass(frozen=True)
class ExitPolicy:
    """Limits of a search.

    Attributes:
        timeout: seconds from the start of the search; 0 sets no limit.
        max_trials: maximum number of evaluated plans.
        performance_only: convert as many ops as possible, without evaluating accuracy.

    Raises:
        ConfigurationError: a limit is out of range.
    """

    timeout: float = 0.0
    max_trials: int = 100
    performance_only: bool = False

    def __post_init__(self) -> None:
        for name, kind in (
            ("timeout", int | float),
            ("max_trials", int),
            ("performance_only", bool),
        ):
            value = getattr(self, name)
            if not isinstance(value, kind) or value != value:
                raise ConfigurationError(f"exit_policy: {name} cannot be {preview(value)}")
        if self.timeout < 0:
            raise ConfigurationError(
                f"exit_policy: timeout cannot be negative, got {preview(self.timeout)}"
            )
        if self.timeout > MOST_SECONDS:
            raise ConfigurationError(
                f"exit_policy: timeout can be {MOST_SECONDS} seconds at most, and 0 sets no limit; "
                f"got {preview(self.timeout)}"
            )
        validate_option("exit_policy: max_trials", integer_between(1), self.max_trials)


def check_min_speedup(value: Any) -> None:
    """Check the minimum speed-up.

    Raises:
        ConfigurationError: the value is not a number, or is out of range.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 1 <= value <= _MAX_SPEEDUP:
        raise ConfigurationError(
            f"min_speedup must be a ratio from 1 to {_MAX_SPEEDUP:g}, got {preview(value)}; "
            f"write 1.03 for plans that are at least 3 % faster than FP32"
        )
