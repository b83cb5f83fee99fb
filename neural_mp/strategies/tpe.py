"""`tpe`: plans drawn as the good ones among those before were."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

from neural_mp.strategies.optuna_search import OptunaStrategy

if TYPE_CHECKING:
    import optuna


class Tpe(OptunaStrategy):
    """The strategy Intel Neural Compressor calls `tpe`: a Tree-structured Parzen Estimator.

    1. Everything as low as it can, then plans at random, 10 in all.
    2. Plans tried so far are parted into good and bad ones. How likely each precision of each
       decision is among either, all decisions together, says what to draw next: what is likelier
       among the good than among the bad. Drawn by Optuna's `TPESampler`.

    For when it ends and what is good, see `Sampled`.

    Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011;
    `tuning_strategies.md`, "TPE".
    """

    name = "tpe"

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        with warnings.catch_warnings():
            # Optuna 4 calls all decisions together an experiment.
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            return optuna.samplers.TPESampler(seed=seed, multivariate=True)
