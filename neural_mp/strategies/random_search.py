"""`random`: plans drawn at random, all as likely."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from neural_mp.strategies.optuna_search import OptunaStrategy

if TYPE_CHECKING:
    import optuna


class RandomSearch(OptunaStrategy):
    """The strategy Intel Neural Compressor calls `random`: every decision by itself, at random.

    1. Everything as low as it can.
    2. Plans in rounds of 8, drawn by Optuna's `RandomSampler`. What became of those before makes no
       difference, so a round can be tried side by side.

    For when each ends, see `Sampled`. The published strategy draws among the ways of INT8 and
    leaves precisions alone; here it is the other way round.

    Source: `tuning_strategies.md`, "Random".
    """

    name = "random"
    round_size: ClassVar[int] = 8

    def sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        """See the base class."""
        import optuna

        return optuna.samplers.RandomSampler(seed=seed)
