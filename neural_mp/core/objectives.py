"""Objectives of a search, as users write them: names and weights."""

from __future__ import annotations

import math
from collections.abc import Mapping
from numbers import Real
from types import MappingProxyType

from neural_mp.core.enums import Objective, ObjectiveName
from neural_mp.errors import ConfigurationError


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
    weights = {name.objective: float(requested[name]) / total for name in names}
    return MappingProxyType(weights)


def is_throughput(value: str | Mapping[str, float]) -> bool:
    """Whether samples per second count instead of the seconds of a call."""
    return ObjectiveName.THROUGHPUT in ((value,) if isinstance(value, str) else value)
