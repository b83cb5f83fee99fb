"""What one pass over the calibration data saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from neural_mp.core.precision import Precision
from neural_mp.util.validators import (
    InvalidValueError,
    Validator,
    finite_numbers,
    invalid,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
    optional,
    positive_float,
    record,
)

Range = tuple[float, float]


@dataclass(frozen=True)
class ChannelStats:
    """What the channels of one tensor held, one number a channel, in the tensor's own units.

    Attributes:
        low, high: the smallest and the largest value.
        power: the mean square.
        mean: the mean.
    """

    low: tuple[float, ...]
    high: tuple[float, ...]
    power: tuple[float, ...]
    mean: tuple[float, ...]


@dataclass(frozen=True)
class OpTimings:
    """What was measured of the time that a model takes.

    Attributes:
        ops: op → precision → seconds of one run, with what runs along in one kernel.
        conversion: seconds that a conversion of the smallest tensor takes; None if not known.
        per_element: seconds more for every number that the tensor holds for one sample.
        whole: seconds of one run of the whole FP32 model; None if not known.
    """

    ops: Mapping[str, Mapping[Precision, float]] = field(default_factory=dict)
    conversion: float | None = None
    per_element: float = 0.0
    whole: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        ops = {op: {p.value: found for p, found in by.items()} for op, by in self.ops.items()}
        found = {"ops": ops, "conversion": self.conversion, "per_element": self.per_element}
        return found if self.whole is None else {**found, "whole": self.whole}

    @classmethod
    def from_dict(cls, data: object) -> OpTimings:
        """Read back what `to_dict` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        return cls(**_TIMES(data))


@dataclass(frozen=True)
class Observations:
    """Ranges and scores of the tensors that may be quantized.

    Attributes:
        ranges: tensor name → calibration algorithm → (low, high), in the tensor's own units.
        nsr: tensor name → noise-to-signal ratio of quantizing it to 8 bits with its full range,
            per channel and averaged over channels: 0 is lossless, 1 means the quantized tensor
            says nothing about a typical channel.
        samples: how many samples were seen.
        channels: tensor name → its channels, of those with so much noise that repairing them may
            be worth it.
        elements: tensor name → numbers it holds for one sample, on average.
        corrected_nsr: tensor name → repair (see `core.precision.REPAIRS`) → what the noise becomes.
    """

    ranges: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    nsr: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    channels: Mapping[str, ChannelStats] = field(default_factory=dict)
    corrected_nsr: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    elements: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranges", "nsr", "channels", "corrected_nsr", "elements"):
            object.__setattr__(self, name, MappingProxyType(dict(getattr(self, name))))

    def __reduce__(self) -> tuple[Any, ...]:
        return Observations.from_dict, (self.to_dict(),)

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, as written to YAML or JSON."""
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
        }

    @classmethod
    def from_dict(cls, data: object) -> Observations:
        """Read back what `to_dict` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        return cls(**_OBSERVATIONS({} if data is None else data))


def _range(value: object) -> Range:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise invalid("a range: [low, high]", value)
    low, high = finite_numbers(value)
    if low > high:
        raise InvalidValueError(f"expected a range, low to high, found [{low}, {high}]")
    return low, high


def _channels(value: object) -> ChannelStats:
    found = _CHANNELS(value)
    if len({len(numbers) for numbers in found.values()}) != 1:
        lengths = ", ".join(f"{len(numbers)} of {name}" for name, numbers in found.items())
        raise InvalidValueError(f"expected lists of one length, found {lengths}")
    return ChannelStats(**found)


def _or_empty(kind: Validator[dict[str, Any]]) -> Validator[dict[str, Any]]:
    """A mapping of a kind; nothing stands for an empty one, as a person would write it."""
    return lambda value: {} if value is None else kind(value)


_CHANNELS = record(dict.fromkeys(ChannelStats.__dataclass_fields__, finite_numbers), strict=True)
_OBSERVATIONS = record(
    {},
    {
        "samples": non_negative_integer,
        "ranges": _or_empty(mapping_of(mapping_of(_range))),
        "nsr": _or_empty(mapping_of(non_negative_float)),
        "elements": _or_empty(mapping_of(non_negative_float)),
        "channels": _or_empty(mapping_of(_channels)),
        # A correction may raise the NSR to infinity.
        "corrected_nsr": _or_empty(mapping_of(mapping_of(number))),
    },
)


def _seconds_by_precision(value: object) -> dict[Precision, float]:
    return {
        Precision.parse(name, "a precision"): s
        for name, s in mapping_of(positive_float)(value).items()
    }


_TIMES = record(
    {
        "ops": mapping_of(_seconds_by_precision),
        "conversion": optional(non_negative_float),
        "per_element": non_negative_float,
    },
    {"whole": positive_float},
)
