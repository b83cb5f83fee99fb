"""Whether an evaluation is lost before its data end, judged against the baseline's own pass.

What is kept of a pass are the metric's values after each batch. A running value times the samples
behind it is a sum, and by how much that sum grows is the batch's score: the mean over the batch
where the metric is a mean over samples, a pseudo-value where it is not. In either case the scores
add up to the value on the full data, so what is judged is what decides in the end.

Of two rules one is enough. **Out of reach** holds for data in any order, but only for means whose
best value is known: a perfect score on all the rest would still miss the target. **Against all
odds** is for every metric, and asks for all of these:

* The loss so far would miss the target even if the rest showed no difference to the baseline.
* A gambler who starts with 1 and bets, batch by batch, that the loss is beyond the tolerance owns
  1/rate. If the target would be met, no strategy gets there with a probability above the rate,
  however often one looks (Ville's inequality). That rests on two things: the batches come in random
  order, and none improves on the baseline by more than the baseline's own batches differ from one
  another, or by more than was seen before. No variance estimate has to be right: it sizes the bets.
* Neither the baseline's batches nor the differences seen contradict the random order, and the
  differences do not grow smaller. Data sorted by class mostly do contradict it; where every class
  scores alike, and early, they do not, and then only the first of these conditions protects a model
  that loses on the first classes and wins on the others.

Bets on sampling without replacement: Waudby-Smith and Ramdas, "Estimating means of bounded random
variables by betting", JRSS B 2024 (arXiv 2010.09686), section 5.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.tuning.criterion import AccuracyCriterion
from neural_mp.util.validators import (
    finite,
    invalid,
    list_of,
    non_negative_integer,
    optional,
    record,
)

Array = NDArray[np.float64]

#: Batches that are only watched: bets need an idea of mean and spread.
WARM_UP_BATCHES = 4
#: Samples below which the odds are not asked.
FEWEST_SAMPLES = 30
#: Share of the wealth that is at stake at most, should the largest foreseen improvement come.
STAKE = 0.75
#: Largest part of a foreseen improvement that is relied on when the rest would have to improve.
RELIANCE = 0.75
#: Batches that the baseline's spread counts for in that of the differences.
PRIOR_BATCHES = 1.0
#: Numbers that differ by less, as a share of their size, differ by rounding.
ROUNDING = 1e-9
#: Values below which their order tells nothing.
FEWEST_IN_ORDER = 8
#: Standard normal and Kuiper (Stephens 1970) quantiles that 2.5% of shuffled data exceed.
NEIGHBOURS_ALIKE = 1.96
LONG_WAVES = 1.862
#: Standard normal quantile of a falling trend. A sixth of shuffled data falls more, for a while.
FALLING = -1.0


@dataclass(frozen=True)
class RunningValues:
    """A metric's values while a pass over the data is under way.

    Attributes:
        values: after each batch, over all samples so far; NaN where it was not defined yet.
        samples: seen after each batch, this one included.

    Raises:
        ValueError: there is not one number of samples for each value.
    """

    values: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) != len(self.samples):
            raise ValueError(f"{len(self.values)} values, but {len(self.samples)} sample counts")

    def then(self, value: float, batch_samples: int) -> RunningValues:
        """These values and the one after a further batch of `batch_samples` samples."""
        seen = self.samples[-1] if self.samples else 0
        return RunningValues((*self.values, value), (*self.samples, seen + batch_samples))

    def to_dict(self) -> dict[str, Any]:
        """As JSON can hold it; what is not finite becomes None."""
        values = [value if math.isfinite(value) else None for value in self.values]
        return {"values": values, "samples": list(self.samples)}

    @classmethod
    def from_dict(cls, data: object) -> RunningValues:
        """The inverse of `to_dict`; what was not finite is NaN.

        Raises:
            NeuralMPError: it was not written so, or the parts do not fit each other.
        """
        said = _RUNNING(data)
        values = tuple(math.nan if value is None else value for value in said["values"])
        if len(values) != len(said["samples"]):
            raise invalid(f"{len(values)} sample counts, as there are values", said["samples"])
        return cls(values, said["samples"])


_RUNNING = record({"values": list_of(optional(finite)), "samples": list_of(non_negative_integer)})


def will_miss_target(
    baseline: RunningValues,
    candidate: RunningValues,
    criterion: AccuracyCriterion,
    rate: float = 0.001,
    best: float | None = None,
) -> bool:
    """Whether a candidate's evaluation can be stopped, as it will miss the target.

    To be asked after every batch; the usual answer, no, takes constant time but for comparing
    the sample counts. It is no whenever the two passes cannot be compared: the sample counts
    differ, a current value or the baseline's last one is not finite; and on the full data, where
    the criterion decides.

    Args:
        baseline: the whole pass of the model that the target is relative to.
        candidate: the pass so far.
        criterion: what the accuracy on the full data has to meet.
        rate: probability with which a model that would meet the target may be stopped, over all
            batches together.
        best: the value that no sample's score can better, of a metric that is a mean over samples
            (1 for the share of right answers, 0 for a squared error); None for all others.

    Raises:
        ValueError: the rate is not between 0 and 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"the rate must lie between 0 and 1, got {rate}")
    seen, final = len(candidate.values), baseline.values[-1] if baseline.values else math.nan
    if not 0 < seen < len(baseline.values) or candidate.samples != baseline.samples[:seen]:
        return False
    ours, theirs = candidate.values[-1], baseline.values[seen - 1]
    if not all(map(math.isfinite, (ours, theirs, final))) or candidate.samples[-1] == 0:
        return False
    share = candidate.samples[-1] / baseline.samples[-1]
    if best is not None and not criterion.met(final, share * ours + (1 - share) * best):
        return True
    if candidate.samples[-1] < FEWEST_SAMPLES:
        return False
    if criterion.met(final, final + share * (ours - theirs)):
        return False
    return _against_all_odds(baseline, candidate, criterion, rate)


def looks_shuffled(values: Sequence[float] | Array) -> bool:
    """Whether numbers, one a batch, could be in random order; about one in twenty such is denied.

    Neighbours that resemble each other contradict it (correlation of lag one), and so do sums
    that wander off further than a Brownian bridge does (Kuiper's statistic).
    """
    if len(values) < FEWEST_IN_ORDER or _is_constant(values):
        return True
    centred = np.asarray(values, float) - np.mean(values)
    count, squares = len(centred), float(centred @ centred)
    alike = (float(centred[1:] @ centred[:-1]) / squares + 1 / count) * math.sqrt(count)
    bridge = np.cumsum(centred) / math.sqrt(squares)
    wave = max(float(bridge.max()), 0.0) - min(float(bridge.min()), 0.0)
    return alike < NEIGHBOURS_ALIKE and wave < LONG_WAVES


def _against_all_odds(
    baseline: RunningValues, candidate: RunningValues, criterion: AccuracyCriterion, rate: float
) -> bool:
    final, seen = baseline.values[-1], len(candidate.values)
    unit = abs(final) if criterion.relative and final != 0 else 1.0
    sign = 1.0 if criterion.prefers_higher else -1.0
    theirs = np.asarray(baseline.values) * (-sign / unit)  # as losses, the criterion's way
    ours = np.asarray(candidate.values) * (-sign / unit)
    scores, sizes = _batches(theirs, np.asarray(baseline.samples))
    scores = scores[sizes >= np.median(sizes) / 2]  # a short last batch scatters most
    with np.errstate(invalid="ignore"):  # Inf less Inf is NaN, a value that is not defined
        worse = ours - theirs[:seen]
    harms, sizes = _batches(worse, np.asarray(candidate.samples))
    total = baseline.samples[-1]
    tolerated = (criterion.tolerance + 1e-9) * total  # forgives what the criterion does
    if _log_wealth(harms, sizes, tolerated, total, scores) < -math.log(rate):
        return False
    return looks_shuffled(scores) and looks_shuffled(harms) and not _falls(harms)


def _falls(values: Array) -> bool:
    """Whether numbers tend to fall from batch to batch: harm that may be over soon."""
    if _is_constant(values):
        return False
    times = np.arange(len(values)) - (len(values) - 1) / 2
    return float(times @ values) < FALLING * float(np.std(values) * np.sqrt(times @ times))


def _is_constant(values: Sequence[float] | Array) -> bool:
    return bool(np.ptp(values) <= ROUNDING * np.max(np.abs(values)))


def _batches(running: Array, samples: NDArray[np.int64]) -> tuple[Array, NDArray[np.int64]]:
    """Scores and sizes of batches; one without a value or samples is counted with the next."""
    defined = np.isfinite(running)
    running, samples = running[defined], samples[defined]
    last = np.append(samples[1:] > samples[:-1], True) & (samples > 0)
    running, samples = running[last], samples[last]
    sizes = np.diff(samples, prepend=0)
    return np.diff(running * samples, prepend=0.0) / sizes, sizes


def _log_wealth(
    harms: Array, sizes: NDArray[np.int64], tolerated: float, total: int, scores: Array
) -> float:
    """Logarithm of what the gambler owns who began with 1; -inf if all is lost.

    Args:
        harms: mean loss against the baseline in each batch seen.
        sizes: their samples.
        tolerated: sum of losses, over the samples, at which the target is just met.
        total: samples in the full data.
        scores: the baseline's batches, in units of `harms`.
    """
    before = np.arange(len(harms))
    counts = np.maximum(before, 1)
    # All that a bet may depend on is known before its batch: sums without the batch itself.
    lost, seen, mean, square, gain, size = (
        np.concatenate(([0.0], tally[:-1]))
        for tally in (
            np.cumsum(harms * sizes),
            np.cumsum(sizes),
            np.cumsum(harms) / np.arange(1, len(harms) + 1),
            np.cumsum(harms**2),
            np.maximum.accumulate(-harms),
            np.maximum.accumulate(np.abs(harms)),
        )
    )
    fair = (tolerated - lost) / (total - seen)  # mean of the rest if the target is just met
    spread = np.maximum(square - counts * mean**2, 0.0) + PRIOR_BATCHES * np.var(scores)
    variance = spread / (before + PRIOR_BATCHES)
    gain = np.maximum(gain, np.ptp(scores))
    gain = np.where(gain > 0, gain, size)
    risk = np.maximum(fair + gain, (1 - RELIANCE) * gain) / STAKE
    edge = mean - fair
    bets = np.zeros(len(harms))
    # The bet that grows fastest, edge / variance, but never more than what is at risk allows.
    worth = (edge > 0) & (before >= WARM_UP_BATCHES)
    np.divide(edge, np.maximum(variance, edge * risk), out=bets, where=worth)
    factors = 1 + bets * (harms - fair)
    return float(np.log(factors).sum()) if (factors > 0).all() else -math.inf
