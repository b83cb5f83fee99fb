"""Choice among runtimes by the seconds of interleaved rounds of each, in one rule for all stages.

The source, the runtime of the given model, is kept unless another one certainly gains enough.
"""

from __future__ import annotations

from collections.abc import Sequence

from neural_mp.profiling import estimate_latency_ratio, estimate_uncontended_latency

#: Speedup over the source, at its lower bound, below which the source is kept.
MIN_RUNTIME_SPEEDUP = 1.05

#: Seconds per batch of each runtime in every interleaved round.
Rounds = Sequence[Sequence[float]]


def select_runtime(rounds: Rounds, source: int | None = 0, current: int | None = None) -> int:
    """Return the index of the fastest runtime whose lower bounds pass; else that of the incumbent.

    The incumbent is the current one if it gains enough over the source, else the source.

    Args:
        rounds: the rounds of each runtime.
        source: index of the source, over which a runtime must gain `MIN_RUNTIME_SPEEDUP`; None if
            it does not take part.
        current: index of a runtime that is left only for one that is certainly faster; None for
            none.
    """
    ranking = _rank_by_latency(rounds)
    gains = current is not None and _gains_enough(rounds, source, current)
    incumbent = current if gains else source
    if incumbent is None:
        return ranking[0]
    return next(
        (
            index
            for index in ranking
            if index != incumbent
            and _gains_enough(rounds, source, index)
            and estimate_latency_ratio(rounds[incumbent], rounds[index]).low > 1
        ),
        incumbent,
    )


def is_certain(rounds: Rounds, source: int | None = 0, current: int | None = None) -> bool:
    """Whether further rounds can hardly change whether the fastest runtime is selected.

    The arguments are those of `select_runtime`.
    """
    fastest = _rank_by_latency(rounds)[0]
    for reference, least in ((source, MIN_RUNTIME_SPEEDUP), (current, 1.0)):
        if reference not in (None, fastest):
            gain = estimate_latency_ratio(rounds[reference], rounds[fastest])
            if gain.low < least <= gain.high:
                return False
    return True


def _rank_by_latency(rounds: Rounds) -> list[int]:
    return sorted(range(len(rounds)), key=lambda index: estimate_uncontended_latency(rounds[index]))


def _gains_enough(rounds: Rounds, source: int | None, index: int) -> bool:
    if source is None or index == source:
        return True
    return estimate_latency_ratio(rounds[source], rounds[index]).low >= MIN_RUNTIME_SPEEDUP
