"""Accuracy criterion, objectives and limits of a search, and the effort that limits follow from."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType

from neural_mp.core.enums import Objective, ObjectiveName
from neural_mp.errors import ConfigurationError, MetricError, TuningError
from neural_mp.util.string_enum import StringEnum
from neural_mp.util.validators import (
    MOST_SECONDS,
    boolean,
    integer_between,
    is_finite,
    optional,
    validate_option,
    values_matching,
)

#: Tolerances from this fraction of the baseline on are rejected: a relative one as a percentage
#: instead of a fraction, an absolute one as a fraction instead of units of the metric.
_MAX_FRACTION = 0.5
#: Baselines below, from 0 on, are rejected if higher is better: labels that do not match the data.
_MIN_BASELINE = 0.01
#: Larger integers have no float.
_MAX_TOLERANCE = 1e300
#: Default minimum speed-up over FP32, beyond measurement noise.
MIN_SPEEDUP = 1.03
#: Upper bound of the minimum speed-up.
_MAX_SPEEDUP = 1000.0
_TOLERANCE = values_matching(
    f"a number of magnitude below {_MAX_TOLERANCE:g}",
    lambda value: is_finite(value) and abs(float(value)) < _MAX_TOLERANCE,
)
_TIMEOUT = values_matching(
    f"a number of seconds from 0 (no limit) to {MOST_SECONDS}",
    lambda value: is_finite(value) and 0 <= value <= MOST_SECONDS,
)
_SPEEDUP = values_matching(
    f"a ratio from 1 to {_MAX_SPEEDUP:g}, e.g. 1.03 to require a gain of 3 % over FP32",
    lambda value: is_finite(value) and 1 <= value <= _MAX_SPEEDUP,
)


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
            amount) and tolerances from half the baseline on are accepted.
        any_baseline: whether a baseline near 0 is accepted if higher is better.

    Raises:
        ConfigurationError: a value is out of range.
    """

    tolerance: float = 0.01
    relative: bool = True
    higher_is_better: bool | None = None
    any_tolerance: bool = field(default=False, compare=False, repr=False)
    any_baseline: bool = field(default=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        name = "accuracy_criterion:"
        validate_option(f"{name} tolerance", _TOLERANCE, self.tolerance)
        validate_option(f"{name} relative", boolean, self.relative)
        validate_option(f"{name} higher_is_better", optional(boolean), self.higher_is_better)
        validate_option(f"{name} any_tolerance", boolean, self.any_tolerance)
        validate_option(f"{name} any_baseline", boolean, self.any_baseline)
        if self.any_tolerance:
            return
        if self.tolerance < 0:
            raise ConfigurationError(f"{name} tolerance cannot be negative, got {self.tolerance}")
        if self.relative and self.tolerance >= _MAX_FRACTION:
            raise ConfigurationError(
                f"{name} a relative tolerance must be below {_MAX_FRACTION:g}, got "
                f"{self.tolerance:g} ({self.tolerance * 100:g} % of the baseline); did you mean "
                f"{self.tolerance / 100:g} ({self.tolerance:g} %)? Accept a larger loss "
                f"by any_tolerance: true"
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

    def check_baseline(self, baseline: float, metric: str) -> None:
        """Check that the baseline is plausible, and the tolerance for this baseline.

        Args:
            baseline: value of the FP32 model.
            metric: name of the metric, for messages.

        Raises:
            MetricError: higher is better, and the baseline is near 0.
            ConfigurationError: an absolute tolerance is half the baseline or more.
        """
        if self.prefers_higher and 0 <= baseline < _MIN_BASELINE and not self.any_baseline:
            raise MetricError(
                f"the {metric} of the FP32 model must be at least {_MIN_BASELINE:g}, got "
                f"{baseline:.5g}; check that the labels match the data, e.g. whether both count "
                f"classes from 0; or accept this value by any_baseline: true in accuracy_criterion"
            )
        if self.relative or baseline == 0 or self.any_tolerance:
            return
        if self.tolerance >= _MAX_FRACTION * abs(baseline):
            raise ConfigurationError(
                f"accuracy_criterion: an absolute tolerance must be below half the baseline, got "
                f"{self.tolerance:g} with {metric} {baseline:.5g} in FP32, i.e. a target of "
                f"{self.target(baseline):.5g}; for {self.tolerance:g} as a fraction of the "
                f"baseline, set relative in YAML, relative=True in Python; or accept this target "
                f"by any_tolerance: true"
            )

    def words(self, source: str = "FP32") -> str:
        """Return the tolerance compared with the given model, e.g. `at most 1 % below FP32`."""
        amount = abs(self.tolerance)
        shown = f"{amount * 100:.4g} %" if self.relative else f"{amount:.4g}"
        bound = "at most" if self.tolerance >= 0 else "at least"
        below = self.prefers_higher is (self.tolerance >= 0)
        return f"{bound} {shown} {'below' if below else 'above'} {source}"

    def __str__(self) -> str:
        kind = "relative" if self.relative else "absolute"
        better = "higher" if self.prefers_higher else "lower"
        return f"{self.tolerance:.4g} {kind}, {better} is better"


@dataclass(frozen=True)
class ExitPolicy:
    """Limits of a search.

    Attributes:
        timeout: seconds from the start of the search; 0 sets no limit. A call of the user's code or
            of a model that does not return is ended later: after 10 seconds, a quarter of the
            limit, or twice the seconds of an evaluation of FP32, whichever is longest.
        max_trials: maximum number of evaluated plans.
        performance_only: convert as many ops as possible, even if they save no time, without
            evaluating accuracy.
        train_seconds: budget of the training of the most promising plan if none meets the target; 0
            sets no limit.

    Raises:
        ConfigurationError: a limit is out of range.
    """

    timeout: float = 0.0
    max_trials: int = 100
    performance_only: bool = False
    train_seconds: float = 0.0

    def __post_init__(self) -> None:
        validate_option("exit_policy: timeout", _TIMEOUT, self.timeout)
        validate_option("exit_policy: max_trials", integer_between(1), self.max_trials)
        validate_option("exit_policy: performance_only", boolean, self.performance_only)
        validate_option("exit_policy: train_seconds", _TIMEOUT, self.train_seconds)


def check_min_speedup(value: object) -> None:
    """Check the minimum speed-up.

    Raises:
        ConfigurationError: the value is not a number, or is out of range.
    """
    validate_option("min_speedup", _SPEEDUP, value)


class DeadlineExceededError(Exception):
    """The time limit passed; caught by the tuner, never seen by users."""


class UnreturnedCallError(DeadlineExceededError, TuningError):
    """A call of the user's code, or of a model, that did not return was ended."""


@dataclass
class Deadline:
    """A time limit, checked after each batch.

    Attributes:
        seconds: duration of the limit; 0 sets no limit.
        started: its start on the monotonic clock.
        cause: what sets the limit, for messages; empty for `exit_policy.timeout`.
        remedy: what the user can do for more time.
    """

    seconds: float = 0.0
    started: float = field(default_factory=lambda: time.monotonic())
    cause: str = ""
    remedy: str = "set a longer timeout"

    def __str__(self) -> str:
        return f"the time limit of {self.seconds:g} s{f' of {self.cause}' if self.cause else ''}"

    def raise_if_passed(self) -> None:
        """Raise `DeadlineExceededError` if the time limit passed; zero seconds set no limit."""
        if self.has_passed:
            raise DeadlineExceededError

    @property
    def has_passed(self) -> bool:
        """Whether the time limit passed."""
        return self.seconds > 0 and time.monotonic() - self.started > self.seconds

    @property
    def end_time(self) -> float:
        """The end on the monotonic clock; infinite without a limit."""
        return self.started + self.seconds if self.seconds else math.inf

    def seconds_left(self) -> float:
        """Return the seconds left, as argument of another `Deadline`; 0 without a limit."""
        if not self.seconds:
            return 0.0
        return max(self.seconds - (time.monotonic() - self.started), 1e-6)


def parse_objectives(value: str | Mapping[str, float]) -> Mapping[Objective, float]:
    """Parse `"latency"`, `"throughput"` or `{"performance": 0.7, "modelsize": 0.3}`.

    Returns:
        Objective → its weight; weights add up to 1.

    Raises:
        ConfigurationError: an objective is unknown or has two names, or a weight is not a positive
            number.
    """
    requested = {value: 1.0} if isinstance(value, str) else value
    if not isinstance(requested, Mapping) or not requested:
        raise ConfigurationError(
            f"objective must be a name, or a mapping of names to weights, got {value!r}"
        )
    for name, weight in requested.items():
        ObjectiveName.parse(name, "objective")
        number = isinstance(weight, Real) and not isinstance(weight, bool)
        if not number or not math.isfinite(weight) or weight <= 0:
            raise ConfigurationError(
                f"objective: the weight of {name!r} must be a positive number, got {weight!r}"
            )
    total = sum(requested.values())
    names = [ObjectiveName(name) for name in requested]
    times = [name.value for name in names if name.objective is Objective.PERFORMANCE]
    if len(times) > 1:
        raise ConfigurationError(
            f"objective must have one of latency (performance) and throughput, got "
            f"{' and '.join(times)}; remove all but one"
        )
    return MappingProxyType({name.objective: float(requested[name]) / total for name in names})


def is_throughput(value: str | Mapping[str, float]) -> bool:
    """Whether samples per second count instead of the seconds of a call."""
    return ObjectiveName.THROUGHPUT in ((value,) if isinstance(value, str) else value)


class Effort(StringEnum):
    """Time that a run may take for a faster result, as a word."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"


@dataclass(frozen=True)
class EffortLimits:
    """Limits of a run.

    Seconds after calibration and the evaluation of FP32 are limited to a multiple of the seconds
    of both, or of calibration and loading if no accuracy is evaluated, plus a fixed number: a
    search is worth more seconds where every step of it takes longer.

    Attributes:
        effort: the effort that the limits belong to.
        multiple, extra_seconds: this multiple, and this number; infinite for no limit.
        duration: multiple of the usual duration of latency measurements.
        patience: maximum seconds of a measurement that decides, as a multiple of its time limit.
        low_precision_runtimes: runtimes timed in lower precisions before one is chosen.
    """

    effort: Effort
    multiple: float = math.inf
    extra_seconds: float = math.inf
    duration: float = 1.0
    patience: float = 6.0
    low_precision_runtimes: int = 2

    def start_deadline(self, known_seconds: float) -> Deadline:
        """Return the deadline of a run from now on, by its seconds so far."""
        if math.isinf(self.multiple):
            return Deadline()
        seconds = math.ceil(self.multiple * known_seconds + self.extra_seconds)
        efforts = list(Effort)
        higher = efforts[efforts.index(self.effort) + 1]
        return Deadline(
            seconds, cause=f"effort '{self.effort}'", remedy=f"set effort to '{higher}'"
        )


#: Effort → its limits.
EFFORT_LIMITS: Mapping[Effort, EffortLimits] = MappingProxyType(
    {
        Effort.QUICK: EffortLimits(
            Effort.QUICK, 3.0, 10.0, duration=0.25, patience=1.0, low_precision_runtimes=0
        ),
        Effort.NORMAL: EffortLimits(Effort.NORMAL, 30.0, 300.0),
        Effort.THOROUGH: EffortLimits(Effort.THOROUGH, duration=2.0),
    }
)
#: Limits unless an effort is set.
NORMAL_LIMITS = EFFORT_LIMITS[Effort.NORMAL]
