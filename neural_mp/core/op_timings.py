"""Times of single ops and conversions, with their spread."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from typing import Annotated, ClassVar, NamedTuple

from neural_mp.core.precision import Precision
from neural_mp.util.json_fields import JsonFields, NonNegative
from neural_mp.util.validators import checked, positive_float

#: Op, or conversion under its own name → seconds of each run.
OpRuns = Mapping[str, tuple[float, ...]]
#: Factor from which the gain of an op is clipped. No kernel gains more: the time of such an op is
#: counted for a neighbour that it is fused into.
MAX_GAIN = 16.0
#: Time of an op that runs within the kernel of another. Not zero, so that ratios are finite.
WITHIN_ANOTHER_SECONDS = 1e-9
_Positive = Annotated[float, checked(positive_float)]
_Ends = tuple[NonNegative, NonNegative]


class ProfileRuns(NamedTuple):
    """Runs of a profile.

    Attributes:
        warm_up: untimed runs.
        timed: timed runs.
    """

    warm_up: int
    timed: int


#: Runs of a profile, of one that decides on plans in little time, and of one that is only shown.
FULL_PROFILE, BRIEF_PROFILE = ProfileRuns(2, 5), ProfileRuns(2, 3)
SHOWN_PROFILE = ProfileRuns(1, 2)


class Duration(NamedTuple):
    """Seconds of an op, from several runs.

    Attributes:
        seconds: the first quartile of the runs. Other load on the machine only adds time, and a
            single fast run decides nothing.
        low, high: the fastest run, and the median.
    """

    seconds: float
    low: float
    high: float

    @classmethod
    def of(cls, runs: Iterable[float]) -> Duration:
        """Summarize one run or more."""
        ordered = sorted(runs)
        return cls(
            _interpolate_quantile(ordered, 0.25), ordered[0], _interpolate_quantile(ordered, 0.5)
        )


def _interpolate_quantile(ordered: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values, linear between two of them."""
    position = share * (len(ordered) - 1)
    below = int(position)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (position - below) * (ordered[above] - ordered[below])


class Gain(NamedTuple):
    """Speed of an op in a precision relative to FP32.

    Attributes:
        value: the factor, `MAX_GAIN` at most.
        low, high: the factor between the slower, and between the faster, ends of both intervals.
        clipped: whether the measured factor exceeds `MAX_GAIN`.
    """

    value: float
    low: float
    high: float
    clipped: bool


@dataclass(frozen=True)
class OpTimings(JsonFields):
    """Measured times of a model's ops and conversions.

    Attributes:
        ops: op → precision → seconds per run, including ops fused into the op's kernel.
        conversion: seconds to convert the smallest tensor; None if unknown.
        per_element: additional seconds per element of the tensor (for one sample).
        whole: seconds per run of the FP32 model; None if unknown.
        spread: op → precision → fastest and median run, as far as recorded.
        conversions: tensor → seconds to convert it, as far as measured.
    """

    omits_defaults: ClassVar[bool] = True

    optional_keys: ClassVar = ("whole", "spread", "conversions")

    ops: Mapping[str, Mapping[Precision, _Positive]] = field(default_factory=dict)
    conversion: NonNegative | None = None
    per_element: NonNegative = 0.0
    whole: _Positive | None = None
    spread: Mapping[str, Mapping[Precision, _Ends]] = field(default_factory=dict)
    conversions: Mapping[str, NonNegative] = field(default_factory=dict)

    def runs_within_another(self, op: str) -> bool:
        """Whether an op in FP32 runs within the kernel of another."""
        return 0.0 < self.ops.get(op, {}).get(Precision.FP32, 0.0) <= WITHIN_ANOTHER_SECONDS

    def scaled_conversions(self, factor: float) -> OpTimings:
        """Return the times with conversions that take `factor` times as long."""
        if self.conversion is None:
            return self
        conversions = {tensor: seconds * factor for tensor, seconds in self.conversions.items()}
        return replace(
            self,
            conversion=self.conversion * factor,
            per_element=self.per_element * factor,
            conversions=conversions,
        )

    def duration(self, op: str, precision: Precision) -> Duration | None:
        """Return the time of an op with its interval; None if not measured."""
        seconds = self.ops.get(op, {}).get(precision)
        if seconds is None:
            return None
        return Duration(seconds, *self.spread.get(op, {}).get(precision, (seconds, seconds)))

    def gain(self, op: str, precision: Precision) -> Gain | None:
        """Return the speed of an op relative to FP32; None if it has no kernel of its own."""
        baseline, candidate = self.duration(op, Precision.FP32), self.duration(op, precision)
        if baseline is None or candidate is None or self.runs_within_another(op):
            return None
        value, low, high = (
            baseline.seconds / candidate.seconds,
            _speedup_factor(baseline.low, candidate.high),
            _speedup_factor(baseline.high, candidate.low),
        )
        most = MAX_GAIN
        return Gain(min(value, most), min(low, most), min(high, most), clipped=value > most)


def _speedup_factor(baseline: float, candidate: float) -> float:
    return baseline / candidate if candidate else inf
