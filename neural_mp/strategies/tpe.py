"""`tpe`: plans drawn by a Tree-structured Parzen Estimator."""

from __future__ import annotations

from typing import TYPE_CHECKING

from neural_mp.strategies.optuna_search import OptunaStrategy

if TYPE_CHECKING:
    import optuna


class Tpe(OptunaStrategy):
    """Intel Neural Compressor's `tpe`: a Tree-structured Parzen Estimator.

    1. The lowest precisions, then random plans, 10 in total.
    2. Trials are split into good and bad ones. The next plan maximizes the ratio of its likelihood
       among the good to that among the bad, for all decisions jointly. Uses Optuna's `TPESampler`.

    For the objective and the end of the search, see `OptunaStrategy`.

    Sources: Bergstra et al., "Algorithms for Hyper-Parameter Optimization", NeurIPS 2011;
    `tuning_strategies.md`, "TPE".
    """

    name = "tpe"

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.TPESampler(seed=seed, multivariate=True)
