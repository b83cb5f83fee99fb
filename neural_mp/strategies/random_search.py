"""`random`: plans drawn uniformly at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from neural_mp.strategies.optuna_search import OptunaStrategy

if TYPE_CHECKING:
    import optuna


class RandomSearch(OptunaStrategy):
    """Intel Neural Compressor's `random`: every decision independently at random.

    1. All ops in their lowest precision.
    2. Plans in rounds of 8, drawn by Optuna's `RandomSampler`. Draws are independent of earlier
       trials, so the plans of a round can be tried in parallel.

    For the end of the search, see `OptunaStrategy`. The published strategy draws INT8 approaches;
    this one draws precisions.

    Source: `tuning_strategies.md`, "Random".
    """

    name = "random"
    round_size: ClassVar[int] = 8

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.RandomSampler(seed=seed)
