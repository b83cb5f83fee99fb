"""What one pass over the calibration data saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from neural_mp.core.precision import Precision
from neural_mp.errors import PlanError

Range = tuple[float, float]


@dataclass(frozen=True)
class Channels:
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
class Times:
    """What was measured of the time that a model takes.

    Attributes:
        ops: op → precision → seconds of one run, with what runs along in one kernel.
        conversion: seconds that a conversion of the smallest tensor takes; None if not known.
        value: seconds more for every number that the tensor holds for one sample.
    """

    ops: Mapping[str, Mapping[Precision, float]] = field(default_factory=dict)
    conversion: float | None = None
    value: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Plain dicts and numbers."""
        ops = {op: {p.value: found for p, found in by.items()} for op, by in self.ops.items()}
        return {"ops": ops, "conversion": self.conversion, "value": self.value}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Times:
        """Read back what `to_dict` wrote."""
        ops = {
            op: {Precision(name): found for name, found in by.items()}
            for op, by in data["ops"].items()
        }
        return cls(ops, data["conversion"], data["value"])


@dataclass(frozen=True)
class Observations:
    """Ranges and scores of the tensors that may be quantized.

    Attributes:
        ranges: tensor name → calibration algorithm → (low, high), in the tensor's own units.
        noise: tensor name → noise-to-signal ratio of quantizing it to 8 bits with its full range,
            per channel and averaged over channels: 0 is lossless, 1 means the quantized tensor
            says nothing about a typical channel.
        samples: how many samples were seen.
        channels: tensor name → its channels, of those with so much noise that repairing them may
            be worth it.
        values: tensor name → numbers it holds for one sample, on average.
        repaired: tensor name → repair (see `core.precision.REPAIRS`) → what the noise becomes.
    """

    ranges: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0
    channels: Mapping[str, Channels] = field(default_factory=dict)
    repaired: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    values: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("ranges", "noise", "channels", "repaired", "values"):
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
            "noise": {tensor: float(noise) for tensor, noise in self.noise.items()},
            "values": {tensor: float(values) for tensor, values in self.values.items()},
            "channels": {
                tensor: {name: list(values) for name, values in vars(channels).items()}
                for tensor, channels in self.channels.items()
            },
            "repaired": {tensor: dict(by) for tensor, by in self.repaired.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observations:
        """Read back what `to_dict` wrote.

        Raises:
            PlanError: a range is not a pair of numbers.
        """
        _require_mapping("observations", data)
        for part in ("ranges", "noise", "channels", "repaired", "values"):
            _require_mapping(f"the {part} in observations", data.get(part) or {})
        ranges: dict[str, dict[str, Range]] = {}
        for tensor, by_algorithm in (data.get("ranges") or {}).items():
            _require_mapping(f"the ranges of tensor {tensor!r}", by_algorithm)
            ranges[str(tensor)] = {}
            for algorithm, pair in by_algorithm.items():
                try:
                    low, high = (float(bound) for bound in pair)
                except (TypeError, ValueError):
                    raise PlanError(
                        f"the {algorithm} range of tensor {tensor!r} must be [low, high], "
                        f"got {pair!r}"
                    ) from None
                ranges[str(tensor)][str(algorithm)] = (low, high)
        noise = {str(tensor): float(value) for tensor, value in (data.get("noise") or {}).items()}
        values = {str(tensor): float(count) for tensor, count in (data.get("values") or {}).items()}
        channels = {
            str(tensor): _channels_from(str(tensor), by)
            for tensor, by in (data.get("channels") or {}).items()
        }
        repaired = {
            str(tensor): {str(repair): float(value) for repair, value in by.items()}
            for tensor, by in (data.get("repaired") or {}).items()
        }
        return cls(ranges, noise, int(data.get("samples", 0)), channels, repaired, values)


def _channels_from(tensor: str, data: Any) -> Channels:
    try:
        found = Channels(**{name: tuple(map(float, values)) for name, values in data.items()})
    except (AttributeError, TypeError, ValueError):
        found = None
    if found is None or len({len(values) for values in vars(found).values()}) != 1:
        words = ", ".join(Channels.__dataclass_fields__)
        raise PlanError(f"the channels of tensor {tensor!r} must be lists of one length: {words}")
    return found


def _require_mapping(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise PlanError(f"{what} must be a mapping, got {value!r}")
