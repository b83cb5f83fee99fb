"""`bayesian`: plans where a Gaussian process expects the most."""

from __future__ import annotations

import warnings
from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from neural_mp.errors import ConfigurationError
from neural_mp.strategies.optuna_search import OptunaStrategy

if TYPE_CHECKING:
    import optuna


class Bayesian(OptunaStrategy):
    """The strategy Intel Neural Compressor calls `bayesian`: Bayesian optimization.

    1. Everything as low as it can, then plans at random, 10 in all.
    2. A Gaussian process is fitted to the plans tried so far, and the next plan is the one with the
       highest expected improvement over the best of them. Done by Optuna's `GPSampler`, with torch.

    For when it ends and what is better, see `Sampled`. The published strategy leaves precisions
    alone and chooses among the ways of INT8; here it is the other way round.

    Source: `tuning_strategies.md`, "Bayesian".

    Raises:
        ConfigurationError: torch is missing.
    """

    name = "bayesian"
    # Having learned nothing in between, it would draw the same again, and slowly.
    repeats: ClassVar[int] = 1

    def __init__(self) -> None:
        # At once, and not after the baseline was evaluated.
        if find_spec("torch") is None:
            raise ConfigurationError(
                "strategy 'bayesian' needs torch, which is not installed; "
                "pip install neural-mp[torch], or use strategy 'tpe', which needs nothing more"
            )

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.GPSampler(seed=seed)
