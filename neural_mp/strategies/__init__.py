"""The search strategies and their registry: one file each, third parties by entry point."""

from __future__ import annotations

from importlib import metadata

from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.strategies.base import Probe, Search, Strategy, TuningProblem

#: Where third parties announce strategies of their own.
ENTRY_POINT_GROUP = "neural_mp.strategies"

#: What is used where the user names none.
DEFAULT = "basic"


def strategy_classes() -> dict[str, type[Strategy]]:
    """Name → strategy."""
    # Not at the top: they import what takes long, and a search is still far off.
    from neural_mp.strategies.basic import Basic
    from neural_mp.strategies.mincut import MinimumCut

    found: dict[str, type[Strategy]] = {own.name: own for own in (Basic, MinimumCut)}
    for entry in metadata.entry_points(group=ENTRY_POINT_GROUP):
        if entry.name not in found:
            found[entry.name] = entry.load()
    return found


def strategy_named(name: str) -> Strategy:
    """A strategy by its name.

    Raises:
        ConfigurationError: there is none of that name.
    """
    known = strategy_classes()
    if name not in known:
        raise ConfigurationError(f"there is no strategy {name!r}{did_you_mean(name, known)}")
    return known[name]()


__all__ = [
    "DEFAULT",
    "Probe",
    "Search",
    "Strategy",
    "TuningProblem",
    "strategy_classes",
    "strategy_named",
]
