"""Observations of one pass over the calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any

from neural_mp.util.text import counted
from neural_mp.util.validators import (
    InvalidValueError,
    Validator,
    finite_numbers,
    instance_of,
    integer_between,
    invalid,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    one_of,
    record,
)

Range = tuple[float, float]


class ChannelRange(tuple[float, float]):
    """A range, with that of every channel, for kernels that read one scale per channel.

    Attributes:
        channels: the range of every channel, within this one.
    """

    channels: tuple[Range, ...]

    def __new__(cls, span: Range, channels: Iterable[Range]) -> ChannelRange:
        """Return a range with those of its channels."""
        instance = super().__new__(cls, span)
        instance.channels = tuple(channels)
        return instance


@dataclass(frozen=True)
class ChannelStats:
    """Statistics of a tensor, one number per channel, in the tensor's own units.

    Attributes:
        low, high: minimum and maximum.
        power: mean square.
        mean: mean.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    power: tuple[float, ...]
    mean: tuple[float, ...]


@dataclass(frozen=True)
class NonFiniteTensor:
    """A tensor that held NaN or Inf in calibration and therefore stays float.

    Attributes:
        value: `NaN` or `Inf`; `NaN` if the tensor held both.
        batch: number of the first such batch, from 1.
    """

    value: str
    batch: int

    def __str__(self) -> str:
        return f"{self.value} in batch {self.batch} of the calibration data"


@dataclass(frozen=True)
class NaNSamples:
    """Samples that calibration left out: NaN in an input of theirs made their outputs NaN.

    Attributes:
        batch: number of the first batch with such samples, from 1.
        samples: their number in all batches.
    """

    batch: int
    samples: int


@dataclass(frozen=True)
class Observations:
    """Ranges and scores of the tensors that may be quantized.

    Attributes:
        ranges: tensor name → calibration algorithm → (low, high), in the tensor's own units.
        nsr: tensor name → noise-to-signal ratio of quantizing the tensor to 8 bits with its full
            range, per channel and averaged over channels: 0 is lossless; at 1, noise and signal of
            a typical channel have equal power.
        samples: number of samples.
        channels: tensor name → channel statistics, of tensors noisy enough that corrections may pay
            off.
        elements: tensor name → mean number of elements per sample.
        corrected_nsr: tensor name → correction (`core.precision.CORRECTIONS`) → resulting NSR.
        non_finite: tensor name → the NaN or Inf that it held; such tensors have no ranges.
        nan_samples: input name → the samples left out for NaN in this input.
    """

    ranges: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    nsr: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    channels: Mapping[str, ChannelStats] = field(default_factory=dict)
    corrected_nsr: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    elements: Mapping[str, float] = field(default_factory=dict)
    non_finite: Mapping[str, NonFiniteTensor] = field(default_factory=dict)
    nan_samples: Mapping[str, NaNSamples] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in (item.name for item in fields(self) if item.name != "samples"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        return Observations.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts and numbers, as written to YAML or JSON."""
        return {
            "samples": self.samples,
            "ranges": {
                tensor: {
                    str(algorithm): [float(low), float(high)]
                    for algorithm, (low, high) in by.items()
                }
                for tensor, by in self.ranges.items()
            },
            "nsr": {tensor: float(nsr) for tensor, nsr in self.nsr.items()},
            "elements": {tensor: float(count) for tensor, count in self.elements.items()},
            "channels": {
                tensor: {name: list(values) for name, values in vars(channels).items()}
                for tensor, channels in self.channels.items()
            },
            "corrected_nsr": {tensor: dict(by) for tensor, by in self.corrected_nsr.items()},
            "non_finite": {tensor: dict(vars(value)) for tensor, value in self.non_finite.items()},
            "nan_samples": {
                name: dict(vars(skipped)) for name, skipped in self.nan_samples.items()
            },
        }

    @property
    def notes(self) -> tuple[str, ...]:
        """Notes to the user on NaN and Inf in the calibration data and in the model."""
        notes = [
            f"calibration left out {counted(skipped.samples, 'sample')} with NaN in input {name!r} "
            f"(first in batch {skipped.batch} of the calibration data), whose outputs are NaN; "
            f"remove or repair these samples"
            for name, skipped in self.nan_samples.items()
        ]
        if self.non_finite:
            name, value = next(iter(self.non_finite.items()))
            number = len(self.non_finite)
            notes.append(
                f"{counted(number, 'tensor')} ({name!r}{', …' if number > 1 else ''}) held "
                f"{value}; INT8 has neither NaN nor Inf, so the ops that read them stay float"
            )
        return tuple(notes)

    @classmethod
    def from_dict(cls, data: object) -> Observations:
        """Reverse `to_dict`.

        Raises:
            NeuralMPError: the data are invalid.
        """
        return cls(**_OBSERVATIONS({} if data is None else data))


def _parse_range(value: object) -> Range:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise invalid("a range: [low, high]", value)
    low, high = finite_numbers(value)
    if low > high:
        raise invalid("a range: [low, high], low ≤ high", [low, high])
    return low, high


def _parse_channels(value: object) -> ChannelStats:
    stats = _CHANNELS(value)
    if len({len(numbers) for numbers in stats.values()}) != 1:
        lengths = ", ".join(f"{name}: {len(numbers)}" for name, numbers in stats.items())
        raise InvalidValueError(f"expected lists of equal length, found {lengths}")
    return ChannelStats(**stats)


def _none_as_empty(kind: Validator[dict[str, Any]]) -> Validator[dict[str, Any]]:
    """Return a validator of a mapping, with None, as in hand-written YAML, read as empty."""
    return lambda value: {} if value is None else kind(value)


_POSITIVE = integer_between(1)
_NON_FINITE = instance_of(
    NonFiniteTensor, record({"value": one_of(("NaN", "Inf")), "batch": _POSITIVE}, strict=True)
)
_NAN_SAMPLES = instance_of(
    NaNSamples, record({"batch": _POSITIVE, "samples": _POSITIVE}, strict=True)
)
_CHANNELS = record(dict.fromkeys(ChannelStats.__dataclass_fields__, finite_numbers), strict=True)
_OBSERVATIONS = record(
    {},
    {
        "samples": non_negative_integer,
        "ranges": _none_as_empty(mapping_of(mapping_of(_parse_range))),
        "nsr": _none_as_empty(mapping_of(non_negative_float)),
        "elements": _none_as_empty(mapping_of(non_negative_float)),
        "channels": _none_as_empty(mapping_of(_parse_channels)),
        # A correction may raise the NSR to infinity.
        "corrected_nsr": _none_as_empty(mapping_of(mapping_of(number))),
        "non_finite": _none_as_empty(mapping_of(_NON_FINITE)),
        "nan_samples": _none_as_empty(mapping_of(_NAN_SAMPLES)),
    },
)
