"""Search strategies and their registry; third-party ones by entry point."""

from __future__ import annotations

from neural_mp.errors import ConfigurationError, did_you_mean
from neural_mp.strategies.base import Probe, Search, Strategy, TuningProblem
from neural_mp.util.plug_ins import create_plug_in, load_plug_ins, require_importable

#: Entry-point group of third-party strategies.
ENTRY_POINT_GROUP = "neural_mp.strategies"

#: Default strategy.
DEFAULT = "mincut"


def _list_built_in() -> dict[str, type[Strategy]]:
    # Imported on demand: Optuna is slow to import.
    from neural_mp.strategies.basic import AutoMixedPrecision, Basic
    from neural_mp.strategies.bit_allocation import BitAllocation
    from neural_mp.strategies.mincut import MinimumCut
    from neural_mp.strategies.optuna_search import Bayesian, RandomSearch, Tpe
    from neural_mp.strategies.sensitivity import HawqV2, Mse, MseV2
    from neural_mp.strategies.uninformed import Conservative, Exhaustive
    from neural_mp.strategies.widening import Widening

    own: tuple[type[Strategy], ...] = (
        Basic,
        MinimumCut,
        Conservative,
        Mse,
        MseV2,
        HawqV2,
        AutoMixedPrecision,
        Exhaustive,
        RandomSearch,
        Tpe,
        Bayesian,
        BitAllocation,
        Widening,
    )
    return {strategy.name: strategy for strategy in own}


def list_strategy_classes() -> dict[str, type[Strategy]]:
    """Return name → strategy class."""
    own = _list_built_in()
    return {**own, **load_plug_ins(ENTRY_POINT_GROUP, own, Strategy)}


def create_strategy_named(name: str) -> Strategy:
    """Return a new strategy by its name.

    Raises:
        ConfigurationError: no strategy has this name.
    """
    strategies = _list_built_in()
    if name not in strategies:  # reading all entry points takes milliseconds
        strategies = list_strategy_classes()
    if name not in strategies:
        what = f"there is no strategy {name!r}"
        require_importable(ENTRY_POINT_GROUP, name, Strategy, ConfigurationError, what)
        raise ConfigurationError(f"{what}{did_you_mean(name, strategies)}")
    return create_plug_in(strategies[name], ConfigurationError, f"the strategy {name!r}")


__all__ = [
    "DEFAULT",
    "Probe",
    "Search",
    "Strategy",
    "TuningProblem",
    "create_strategy_named",
    "list_strategy_classes",
]
