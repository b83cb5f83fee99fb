"""`bayesian`: Bayesian optimization with a Gaussian process."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING, ClassVar

from neural_mp.errors import ConfigurationError
from neural_mp.strategies.optuna_search import OptunaStrategy
from neural_mp.util.installation import install_command

if TYPE_CHECKING:
    import optuna


class Bayesian(OptunaStrategy):
    """Intel Neural Compressor's `bayesian`: Bayesian optimization.

    1. The lowest precisions, then random plans, 10 in total.
    2. A Gaussian process is fitted to the trials; the next plan has the highest expected
       improvement over the best one. Uses Optuna's `GPSampler`, which requires torch.

    For the objective and the end of the search, see `OptunaStrategy`. The published strategy
    chooses among INT8 approaches; this one chooses precisions.

    Source: `tuning_strategies.md`, "Bayesian".

    Raises:
        ConfigurationError: torch is missing.
    """

    name = "bayesian"
    # Without a new trial, the sampler would repeat its draw, and slowly.
    repeats: ClassVar[int] = 1

    def __init__(self) -> None:
        # Fail at once instead of after evaluating the baseline.
        if find_spec("torch") is None:
            raise ConfigurationError(
                "strategy 'bayesian' requires torch, which is not installed; run "
                f"{install_command('torch')}, or use strategy 'tpe', which requires no torch"
            )

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.GPSampler(seed=seed)
