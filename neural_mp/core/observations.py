"""Observations of one pass over the calibration data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from neural_mp.util.validators import (
    InvalidValueError,
    Validator,
    finite_numbers,
    invalid,
    mapping_of,
    non_negative_float,
    non_negative_integer,
    number,
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
        made = super().__new__(cls, span)
        made.channels = tuple(channels)
        return made


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
        }

    @classmethod
    def from_dict(cls, data: object) -> Observations:
        """Reverse `to_dict`.

        Raises:
            NeuralMPError: the data are invalid.
        """
        return cls(**_OBSERVATIONS({} if data is None else data))


def _range(value: object) -> Range:
    if not isinstance(value, list | tuple) or len(value) != 2:
        raise invalid("a range: [low, high]", value)
    low, high = finite_numbers(value)
    if low > high:
        raise invalid("a range: [low, high], low ≤ high", [low, high])
    return low, high


def _channels(value: object) -> ChannelStats:
    found = _CHANNELS(value)
    if len({len(numbers) for numbers in found.values()}) != 1:
        lengths = ", ".join(f"{name}: {len(numbers)}" for name, numbers in found.items())
        raise InvalidValueError(f"expected lists of equal length, found {lengths}")
    return ChannelStats(**found)


def _or_empty(kind: Validator[dict[str, Any]]) -> Validator[dict[str, Any]]:
    """Return a validator of a mapping, with None, as in hand-written YAML, read as empty."""
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
