"""When a model is good enough, and when a search has gone on for long enough."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from neural_mp.errors import ConfigurationError
from neural_mp.util.validators import MOST_SECONDS, integer_between, preview, validate_option

#: A relative tolerance from here on is a percentage that was written as a share.
_TOO_LARGE_A_SHARE = 0.5
#: Whole numbers beyond have no float.
_LARGEST = 1e300
#: How many times as fast as FP32 a plan must be for sure unless the user says otherwise.
MIN_SPEEDUP = 1.03
#: The most that a plan can be asked to gain.
_MAX_SPEEDUP = 1000.0


@dataclass(frozen=True)
class AccuracyCriterion:
    """How much worse than FP32 a model may be.

    Attributes:
        tolerance: the loss that is tolerated: a share of the baseline (0.01 is one percent) if
            `relative`, else an amount in the metric's own units.
        relative: which of the two.
        higher_is_better: False for errors and losses; None takes the direction that the metric
            (or `eval_func`) gives itself, and where it gives none, the larger value is better.
        any_tolerance: whether a negative tolerance (a model has to be that much better than FP32)
            and a share of one half and more are accepted.

    Raises:
        ConfigurationError: the tolerance is no number; or it is negative or a share of one half and
            more, and not `any_tolerance`.
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
        """Whether the larger value is the better one; it is where nobody says."""
        return self.higher_is_better is not False

    def loss(self, baseline: float, accuracy: float) -> float:
        """How much worse `accuracy` is, as a share of the baseline if relative.

        A share of a baseline of zero does not exist; the amount is taken then.
        """
        worse = baseline - accuracy if self.prefers_higher else accuracy - baseline
        return worse / abs(baseline) if self.relative and baseline != 0 else worse

    def met(self, baseline: float, accuracy: float) -> bool:
        """Whether `accuracy` is within tolerance; NaN never is."""
        # One part in 10⁹ forgives the rounding of 0.99 · baseline, no more.
        return self.loss(baseline, accuracy) <= self.tolerance + 1e-9

    def target(self, baseline: float) -> float:
        """The worst accuracy that is still accepted."""
        allowed = self.tolerance * (abs(baseline) if self.relative and baseline != 0 else 1.0)
        return baseline - allowed if self.prefers_higher else baseline + allowed

    def __str__(self) -> str:
        kind = (
            f"{self.tolerance:.4g} relative" if self.relative else f"{self.tolerance:.4g} absolute"
        )
        return f"{kind}, {'higher' if self.prefers_higher else 'lower'} is better"


@dataclass(frozen=True)
class ExitPolicy:
    """When a search ends whether or not the target was met.

    Attributes:
        timeout: seconds from the start of the search; 0 sets no limit.
        max_trials: plans evaluated at most.
        performance_only: do not evaluate accuracy at all: convert as much as possible.

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
    """Refuse what no plan can be asked to gain.

    Raises:
        ConfigurationError: it is no number, or out of range.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 1 <= value <= _MAX_SPEEDUP:
        raise ConfigurationError(
            f"min_speedup must be a ratio from 1 to {_MAX_SPEEDUP:g}, got {preview(value)}; "
            f"write 1.03 for plans that are at least 3 % faster than FP32"
        )
