"""Kernels that ran for an op, and times of single ops and conversions.

Times have their spread, and the workload that weighs them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from math import inf
from typing import Annotated, ClassVar, NamedTuple

from neural_mp.core.enums import Approach
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import ConfigurationError
from neural_mp.util.json_fields import JsonFields, NonNegative
from neural_mp.util.validators import (
    integer_between,
    keep_original_value,
    non_negative_float,
    positive_float,
    validate_option,
)

#: Op, or conversion under its own name → seconds of each run.
OpRuns = Mapping[str, tuple[float, ...]]
#: Factor from which the gain of an op is clipped. No kernel gains more: the time of such an op is
#: counted for a neighbour that it is fused into.
MAX_GAIN = 16.0
#: Time of an op that runs within the kernel of another. Not zero, so that ratios are finite.
WITHIN_ANOTHER_SECONDS = 1e-9
_Positive = Annotated[float, keep_original_value(positive_float)]
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
    def from_runs(cls, runs: Iterable[float]) -> Duration:
        """Summarize one run or more."""
        ordered = sorted(runs)
        quartile, median = (_interpolate_quantile(ordered, share) for share in (0.25, 0.5))
        return cls(quartile, ordered[0], median)


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

    optional_keys: ClassVar[Collection[str] | None] = ("whole", "spread", "conversions")

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

    def op_duration(self, op: str, precision: Precision) -> Duration | None:
        """Return the time of an op with its interval; None if not measured."""
        seconds = self.ops.get(op, {}).get(precision)
        if seconds is None:
            return None
        return Duration(seconds, *self.spread.get(op, {}).get(precision, (seconds, seconds)))

    def op_gain(self, op: str, precision: Precision) -> Gain | None:
        """Return the speed of an op relative to FP32; None if it has no kernel of its own."""
        baseline, candidate = self.op_duration(op, Precision.FP32), self.op_duration(op, precision)
        if baseline is None or candidate is None or self.runs_within_another(op):
            return None
        value = baseline.seconds / candidate.seconds
        low = baseline.low / candidate.high if candidate.high else inf
        high = baseline.high / candidate.low if candidate.low else inf
        most = MAX_GAIN
        return Gain(min(value, most), min(low, most), min(high, most), clipped=value > most)


#: Form of a layer (`describe_timed_form`) → rows per call → seconds.
FormTimes = Mapping[str, Mapping[int, float]]
#: Upper bound of a prompt, beyond the context of any model in use.
_LONGEST_PROMPT = 1 << 24
#: Default number of tokens of a prompt.
_PROMPT = 512
#: Rows per call while tokens are generated one by one.
_DECODE_ROWS = 1


@dataclass(frozen=True)
class Workload:
    """Shares of the tokens that a decoder generates one by one, and reads in prompts.

    Attributes:
        decode: share of generated tokens, one row per call.
        prefill: share of tokens in prompts, `prompt` rows per call.
        prompt: tokens per prompt.

    Raises:
        ConfigurationError: a value is out of range, or both shares are 0.
    """

    decode: float = 0.0
    prefill: float = 0.0
    prompt: int = _PROMPT

    def __post_init__(self) -> None:
        for name in ("decode", "prefill"):
            validate_option(f"workload.{name}", non_negative_float, getattr(self, name))
        validate_option("workload.prompt", integer_between(1, _LONGEST_PROMPT), self.prompt)
        if not self.decode + self.prefill > 0:
            raise ConfigurationError(
                "workload must have a share of decode or prefill above 0, got 0 for both; set e.g. "
                "{decode: 0.8, prefill: 0.2, prompt: 512}"
            )

    def __str__(self) -> str:
        return f"decode {self.decode:g}, prefill {self.prefill:g}, prompt {self.prompt}"

    @classmethod
    def from_value(cls, value: object) -> Workload | None:
        """Return a workload from a workload, or a dict as in YAML; None if unset.

        Raises:
            ConfigurationError: the type is wrong, a key is unknown, or a value is out of range.
        """
        if value is None or isinstance(value, Workload):
            return value
        names = [entry.name for entry in fields(cls)]
        if not isinstance(value, Mapping) or not {*value} <= {*names}:
            raise ConfigurationError(
                f"workload must be a mapping of {', '.join(names)}, e.g. {{decode: 0.8, "
                f"prefill: 0.2, prompt: 512}}, got {value!r}"
            )
        return cls(**value)

    @property
    def row_counts(self) -> tuple[int, ...]:
        """Rows per call that layers are timed with, in ascending order; those with a share."""
        shares = ((_DECODE_ROWS, self.decode), (self.prompt, self.prefill))
        return tuple(sorted({rows for rows, share in shares if share}))

    def seconds_per_token(self, times: Mapping[int, float]) -> float:
        """Return the mean seconds per token from the seconds per call of each number of rows."""
        per_token = self.prefill * times[self.prompt] / self.prompt if self.prefill else 0.0
        one_by_one = self.decode * times[_DECODE_ROWS] if self.decode else 0.0
        return (one_by_one + per_token) / (self.decode + self.prefill)


def describe_timed_form(config: OpConfig) -> str | None:
    """Return the properties of a configuration that decide on the kernel; None if not timed.

    The rounding of a weight does not change its kernel. Static ranges are not timed, as their
    kernels depend on the neighbours of a layer.
    """
    if config.approach is Approach.STATIC:
        return None
    weight = config.weight
    isolated = replace(
        config, weight=None if weight is None else weight.uncorrected, corrections=()
    )
    parts = (isolated.precision, isolated.kernel, isolated.weight, isolated.activation)
    return ", ".join(str(part) for part in parts if part)


@dataclass(frozen=True)
class OpTrace:
    """Kernels executed for one op, excluding input and output conversions.

    Attributes:
        kernels: the runtime's kernel names, in execution order; empty if the model's kernels of the
            op were not reached on these inputs.
        precision: compute precision: INT8 if any kernel is an integer kernel, else the first
            floating-point type read; None if none was read.
        reads_int8: whether any kernel read 8-bit values.
        rounded_to: 16-bit precision set for the op if the runtime lacks such a kernel: the op was
            computed in FP32 on rounded values.
        equals_float: whether an integer kernel of the op stands for the float op between quantized
            tensors: its results are equal, but for rounding.
    """

    kernels: tuple[str, ...]
    precision: Precision | None = None
    reads_int8: bool = False
    rounded_to: Precision | None = None
    equals_float: bool = False

    @property
    def was_executed(self) -> bool:
        """Whether any kernel of the op ran."""
        return bool(self.kernels)

    @property
    def effective_precision(self) -> Precision | None:
        """The compute precision; INT8 also for ops that only move 8-bit values."""
        if self.precision is None and self.reads_int8:
            return Precision.INT8
        return self.precision


#: Trace of an op without executed kernels.
NOT_REACHED = OpTrace(())


@dataclass(frozen=True)
class TracedKernel:
    """One executed kernel.

    Attributes:
        name: the runtime's kernel name.
        precision: INT8 for an integer kernel, else the first floating-point type read; None if none
            was read.
        reads_int8: whether the kernel read 8-bit values.
    """

    name: str
    precision: Precision | None = None
    reads_int8: bool = False


def build_op_trace(
    kernels: Sequence[TracedKernel], rounded_to: Precision | None = None, equals_float: bool = False
) -> OpTrace:
    """Return the trace of an op from its kernels in execution order."""
    precisions = [kernel.precision for kernel in kernels if kernel.precision is not None]
    return OpTrace(
        tuple(kernel.name for kernel in kernels),
        Precision.INT8 if Precision.INT8 in precisions else next(iter(precisions), None),
        any(kernel.reads_int8 for kernel in kernels),
        rounded_to,
        equals_float,
    )
