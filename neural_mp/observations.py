"""What one pass over the calibration data saw."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from neural_mp.errors import PlanError

Range = tuple[float, float]


@dataclass(frozen=True)
class Observations:
    """Ranges and scores of the tensors that may be quantized.

    Attributes:
        ranges: tensor name → calibration algorithm → (low, high), in the tensor's own units.
        noise: tensor name → noise-to-signal ratio of quantizing it to 8 bits with its full range,
            per channel and averaged over channels: 0 is lossless, 1 means the quantized tensor
            says nothing about a typical channel.
        samples: how many samples were seen.
    """

    ranges: Mapping[str, Mapping[str, Range]] = field(default_factory=dict)
    noise: Mapping[str, float] = field(default_factory=dict)
    samples: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "ranges", MappingProxyType(dict(self.ranges)))
        object.__setattr__(self, "noise", MappingProxyType(dict(self.noise)))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, dicts and numbers, as written to YAML or JSON."""
        return {
            "samples": self.samples,
            "ranges": {
                tensor: {
                    algorithm: [float(low), float(high)] for algorithm, (low, high) in by.items()
                }
                for tensor, by in self.ranges.items()
            },
            "noise": {tensor: float(noise) for tensor, noise in self.noise.items()},
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Observations:
        """Read back what `to_dict` wrote.

        Raises:
            PlanError: a range is not a pair of numbers.
        """
        _require_mapping("observations", data)
        _require_mapping("the ranges in observations", data.get("ranges") or {})
        _require_mapping("the noise in observations", data.get("noise") or {})
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
        return cls(ranges, noise, int(data.get("samples", 0)))


def _require_mapping(what: str, value: Any) -> None:
    if not isinstance(value, Mapping):
        raise PlanError(f"{what} must be a mapping, got {value!r}")
