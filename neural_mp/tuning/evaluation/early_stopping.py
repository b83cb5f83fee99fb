"""Early stopping of evaluations that will miss the target, judged against the baseline's pass.

A pass is recorded as the metric's running values after each batch. A running value times the number
of samples is a sum, whose increase is the batch's score: the mean over the batch if the metric is a
mean over samples, otherwise a pseudo-value. In either case the scores add up to the value on the
full data, so early stopping judges the final quantity.

Either of two rules suffices. **Out of reach** holds for data in any order, but only for means with
a known best value: a perfect score on all remaining samples would still miss the target. **Against
all odds** applies to every metric, and requires all of these:

* The loss so far would miss the target even if the rest showed no difference to the baseline.
* A gambler who starts with 1 and bets, batch by batch, that the loss exceeds the tolerance owns
  1/rate. If the target would be met, no strategy reaches that wealth with a probability above the
  rate, however often it is checked (Ville's inequality). Two assumptions: batches come in random
  order, and no batch improves on the baseline by more than the baseline's own batches differ from
  one another, or by more than was seen before. No variance estimate has to be right: it only sizes
  the bets.
* Neither the baseline's batches nor the observed differences contradict random order, and the
  differences do not decrease. Data sorted by class mostly contradict random order. If all classes
  score alike, and early, they do not; then only the first of these conditions protects a model that
  loses on the first classes and wins on the others.

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

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.util.validators import (
    finite,
    invalid_value_error,
    list_of,
    non_negative_integer,
    optional,
    record,
)

Array = NDArray[np.float64]

#: Batches without bets, to estimate mean and spread.
WARM_UP_BATCHES = 4
#: Minimum number of samples for the rule on odds.
FEWEST_SAMPLES = 30
#: Maximum fraction of the wealth lost if the largest foreseen improvement occurs.
STAKE = 0.75
#: Largest fraction of a foreseen improvement to rely on if the rest would have to improve.
RELIANCE = 0.75
#: Weight of the baseline's variance in that of the differences, in batches.
PRIOR_BATCHES = 1.0
#: Smaller relative differences are rounding errors.
ROUNDING = 1e-9
#: Fewer values allow no test of their order.
FEWEST_IN_ORDER = 8
#: Standard normal and Kuiper (Stephens 1970) quantiles exceeded by 2.5% of shuffled data.
NEIGHBOURS_ALIKE = 1.96
LONG_WAVES = 1.862
#: Standard normal quantile of a falling trend; a sixth of shuffled data falls faster.
FALLING = -1.0
#: Maximum number of checks per pass.
_MAX_CHECKS = 32


@dataclass(frozen=True)
class RunningValues:
    """A metric's running values during a pass over the data.

    Attributes:
        values: value after each batch, over all samples so far; NaN if undefined.
        samples: number of samples up to and including each batch.

    Raises:
        ValueError: `values` and `samples` differ in length.
    """

    values: tuple[float, ...] = ()
    samples: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if len(self.values) != len(self.samples):
            raise ValueError(
                f"samples must have one item per value ({len(self.values)}), got "
                f"{len(self.samples)}"
            )

    def with_batch(self, value: float, batch_samples: int) -> RunningValues:
        """Return these values with that of a further batch of `batch_samples` samples."""
        previous = self.samples[-1] if self.samples else 0
        return RunningValues((*self.values, value), (*self.samples, previous + batch_samples))

    def to_dict(self) -> dict[str, Any]:
        """Return a JSON-compatible dict; non-finite values become None."""
        values = [value if math.isfinite(value) else None for value in self.values]
        return {"values": values, "samples": list(self.samples)}

    @classmethod
    def from_dict(cls, data: object) -> RunningValues:
        """Read the result of `to_dict`; None becomes NaN.

        Raises:
            NeuralMPError: `data` does not match the schema, or its parts differ in length.
        """
        fields = _RUNNING(data)
        values = tuple(math.nan if value is None else value for value in fields["values"])
        if len(values) != len(fields["samples"]):
            raise invalid_value_error(
                f"{len(values)} sample counts, one per value", fields["samples"]
            )
        return cls(values, fields["samples"])


_RUNNING = record({"values": list_of(optional(finite)), "samples": list_of(non_negative_integer)})


def is_check_due(number: int, count: int | None) -> bool:
    """Whether to compute the running accuracy after batch `number`: some metrics are slow."""
    if not count:
        return number.bit_count() == 1  # 1, 2, 4, 8, …: total unknown
    return number % max(1, count // _MAX_CHECKS) == 0


def will_miss_target(
    baseline: RunningValues,
    candidate: RunningValues,
    criterion: AccuracyCriterion,
    rate: float = 0.001,
    best: float | None = None,
) -> bool:
    """Whether a candidate's evaluation can stop because it will miss the target.

    Called after every batch; the usual answer, False, costs constant time besides comparing the
    sample counts. Always False if the passes are not comparable (sample counts differ; a current
    value or the baseline's last one is not finite), and on the full data, for which the criterion
    decides.

    Args:
        baseline: the complete pass of the reference model.
        candidate: the pass so far.
        criterion: criterion for the accuracy on the full data.
        rate: probability of stopping a model that would meet the target, over all batches together.
        best: the best possible score of a sample, if the metric is a mean over samples (1 for
            accuracy, 0 for a squared error); otherwise None.

    Raises:
        ValueError: the rate is not between 0 and 1.
    """
    if not 0 < rate < 1:
        raise ValueError(f"rate must be between 0 and 1, got {rate}")
    count, final = len(candidate.values), baseline.values[-1] if baseline.values else math.nan
    if not 0 < count < len(baseline.values) or candidate.samples != baseline.samples[:count]:
        return False
    ours, theirs = candidate.values[-1], baseline.values[count - 1]
    if not all(map(math.isfinite, (ours, theirs, final))) or candidate.samples[-1] == 0:
        return False
    fraction = candidate.samples[-1] / baseline.samples[-1]
    if best is not None and not criterion.met(final, fraction * ours + (1 - fraction) * best):
        return True
    if candidate.samples[-1] < FEWEST_SAMPLES:
        return False
    if criterion.met(final, final + fraction * (ours - theirs)):
        return False
    return _against_all_odds(baseline, candidate, criterion, rate)


def looks_shuffled(values: Sequence[float] | Array) -> bool:
    """Whether numbers, one per batch, may be in random order; rejects about 5 % of such data.

    Correlated neighbours (lag one) contradict random order, and so do sums that deviate further
    than a Brownian bridge (Kuiper's statistic).
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
    final, count = baseline.values[-1], len(candidate.values)
    unit = abs(final) if criterion.relative and final != 0 else 1.0
    sign = 1.0 if criterion.prefers_higher else -1.0
    theirs = np.asarray(baseline.values) * (-sign / unit)  # as losses, like the criterion
    ours = np.asarray(candidate.values) * (-sign / unit)
    scores, sizes = _list_batch_scores(theirs, np.asarray(baseline.samples))
    scores = scores[sizes >= np.median(sizes) / 2]  # a short last batch has the largest variance
    with np.errstate(invalid="ignore"):  # Inf - Inf is NaN: an undefined value
        worse = ours - theirs[:count]
    losses, sizes = _list_batch_scores(worse, np.asarray(candidate.samples))
    total = baseline.samples[-1]
    tolerated = (criterion.tolerance + 1e-9) * total  # same slack as the criterion
    if _compute_log_wealth(losses, sizes, tolerated, total, scores) < -math.log(rate):
        return False
    return looks_shuffled(scores) and looks_shuffled(losses) and not _tends_to_fall(losses)


def _tends_to_fall(values: Array) -> bool:
    """Whether numbers tend to fall from batch to batch: the loss may not persist."""
    if _is_constant(values):
        return False
    times = np.arange(len(values)) - (len(values) - 1) / 2
    return float(times @ values) < FALLING * float(np.std(values) * np.sqrt(times @ times))


def _is_constant(values: Sequence[float] | Array) -> bool:
    return bool(np.ptp(values) <= ROUNDING * np.max(np.abs(values)))


def _list_batch_scores(
    running: Array, samples: NDArray[np.int64]
) -> tuple[Array, NDArray[np.int64]]:
    """Return scores and sizes of batches; those without value or samples join the next."""
    defined = np.isfinite(running)
    running, samples = running[defined], samples[defined]
    last = np.append(samples[1:] > samples[:-1], True) & (samples > 0)
    running, samples = running[last], samples[last]
    sizes = np.diff(samples, prepend=0)
    return np.diff(running * samples, prepend=0.0) / sizes, sizes


def _compute_log_wealth(
    losses: Array, sizes: NDArray[np.int64], tolerated: float, total: int, scores: Array
) -> float:
    """Return the logarithm of the wealth of a gambler who began with 1; -inf if all is lost.

    Args:
        losses: mean loss against the baseline in each batch seen.
        sizes: number of samples in each batch.
        tolerated: sum of losses, over the samples, at which the target is just met.
        total: number of samples in the full data.
        scores: scores of the baseline's batches, in units of `losses`.
    """
    earlier = np.arange(len(losses))
    counts = np.maximum(earlier, 1)
    # A bet may depend on earlier batches only: sums exclude the batch itself.
    lost, samples, mean, square, gain, size = (
        np.concatenate(([0.0], tally[:-1]))
        for tally in (
            np.cumsum(losses * sizes),
            np.cumsum(sizes),
            np.cumsum(losses) / np.arange(1, len(losses) + 1),
            np.cumsum(losses**2),
            np.maximum.accumulate(-losses),
            np.maximum.accumulate(np.abs(losses)),
        )
    )
    fair = (tolerated - lost) / (total - samples)  # mean of the rest if the target is just met
    spread = np.maximum(square - counts * mean**2, 0.0) + PRIOR_BATCHES * np.var(scores)
    variance = spread / (earlier + PRIOR_BATCHES)
    gain = np.maximum(gain, np.ptp(scores))
    gain = np.where(gain > 0, gain, size)
    risk = np.maximum(fair + gain, (1 - RELIANCE) * gain) / STAKE
    edge = mean - fair
    bets = np.zeros(len(losses))
    # Growth-optimal bet, edge / variance, bounded by the risk.
    worth = (edge > 0) & (earlier >= WARM_UP_BATCHES)
    np.divide(edge, np.maximum(variance, edge * risk), out=bets, where=worth)
    factors = 1 + bets * (losses - fair)
    return float(np.log(factors).sum()) if (factors > 0).all() else -math.inf
