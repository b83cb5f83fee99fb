"""Confidence bounds of accuracies: of random models, and of language models on other texts.

Language models in a plan and in FP32 are evaluated on the same texts, so their losses are compared
text by text: the spread of the differences is far smaller than that of the losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.criterion import AccuracyCriterion
from neural_mp.util.pytree import convert_to_numpy, tree_leaves

#: Noise-to-signal power ratio between two runs above which outputs are random: below are rounding
#: errors of sums in another order.
_MAX_ROUNDING_NSR = 1e-8
#: Passes over the data with FP32: at least the first number, then up to the second within the time.
FEWEST_PASSES, MOST_PASSES = 3, 5
_REPEAT_SECONDS = 60.0
#: Quantile of 95 % of Student's t distribution by degrees of freedom.
_T_QUANTILES = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132}


#: Accuracy of a pass, and its values by name.
Pass: TypeAlias = tuple[float, Mapping[str, float]]


@dataclass(frozen=True)
class AccuracySpread:
    """Spread of FP32's accuracy between passes over the same data.

    Attributes:
        deviation: standard deviation of the accuracy of one pass; 0 for deterministic models.
        passes: number of passes with FP32; its accuracy is their mean.
    """

    deviation: float = 0.0
    passes: int = 1

    def confidence_bound(self, criterion: AccuracyCriterion, accuracy: float, passes: int) -> float:
        """Return the 95 % confidence bound of a mean over `passes` passes compared with FP32's."""
        if not self.deviation:
            return accuracy
        quantile = _T_QUANTILES[min(self.passes - 1, max(_T_QUANTILES))]
        margin = quantile * self.deviation * math.sqrt(1 / self.passes + 1 / passes)
        return accuracy - margin if criterion.prefers_higher else accuracy + margin

    def meets_target(
        self, criterion: AccuracyCriterion, baseline: float, accuracy: float, passes: int = 1
    ) -> bool:
        """Whether the confidence bound of an accuracy is within tolerance."""
        return criterion.met(baseline, self.confidence_bound(criterion, accuracy, passes))

    def repeat_evaluation(
        self, evaluate: Callable[[], Pass], criterion: AccuracyCriterion, baseline: float
    ) -> RepeatedAccuracy:
        """Evaluate a model as often as FP32 if its mean accuracy leaves the verdict in doubt."""
        accuracy = RepeatedAccuracy((evaluate(),))
        while (
            len(accuracy.passes) < self.passes
            and criterion.met(baseline, accuracy.mean_accuracy)
            and not self.meets_target(
                criterion, baseline, accuracy.mean_accuracy, len(accuracy.passes)
            )
        ):
            accuracy = RepeatedAccuracy((*accuracy.passes, evaluate()))
        return accuracy


@dataclass(frozen=True)
class RepeatedAccuracy:
    """Accuracy and metric values by name of each pass over the data."""

    passes: tuple[Pass, ...]

    @property
    def accuracies(self) -> list[float]:
        """Accuracy of each pass."""
        return [accuracy for accuracy, _ in self.passes]

    @property
    def mean_accuracy(self) -> float:
        """Mean accuracy, that of a single pass exactly."""
        return self.accuracies[0] if len(self.passes) == 1 else float(np.mean(self.accuracies))

    @property
    def mean_values(self) -> dict[str, float]:
        """Mean of each named value."""
        if len(self.passes) == 1:
            return dict(self.passes[0][1])
        return {n: float(np.mean([v[n] for _, v in self.passes])) for n in self.passes[0][1]}


def repeat_baseline(first: Pass, evaluate: Callable[[], Pass]) -> RepeatedAccuracy:
    """Return FP32's accuracy in several passes, the first of which is given."""
    accuracy, started = RepeatedAccuracy((first,)), time.monotonic()
    while len(accuracy.passes) < MOST_PASSES:
        late = time.monotonic() - started > _REPEAT_SECONDS
        if late and len(accuracy.passes) >= FEWEST_PASSES:
            break
        again = evaluate()
        if not math.isfinite(again[0]):
            break
        accuracy = RepeatedAccuracy((*accuracy.passes, again))
    return accuracy


def is_random(model: Callable[[Any], Any], inputs: object) -> bool:
    """Whether two runs of a model on the same inputs return different outputs."""
    first, second = (_list_output_arrays(model(inputs)) for _ in range(2))
    return len(first) != len(second) or any(map(_arrays_differ, first, second))


def _list_output_arrays(outputs: object) -> list[np.ndarray]:
    return [convert_to_numpy(leaf) for leaf in tree_leaves(outputs) if hasattr(leaf, "shape")]


def _arrays_differ(first: np.ndarray, second: np.ndarray) -> bool:
    if first.shape != second.shape:
        return True
    if first.dtype.kind != "f":
        return not np.array_equal(first, second)
    finite = np.isfinite(first) & np.isfinite(second)
    if not np.array_equal(first[~finite], second[~finite], equal_nan=True):
        return True
    a, b = first[finite].astype(np.float64), second[finite].astype(np.float64)
    return bool(np.square(a - b).sum() > _MAX_ROUNDING_NSR * np.square(a).sum())


Floats: TypeAlias = NDArray[np.float64]

#: Maximum number of blocks of texts; more texts are merged with their neighbours.
_MOST_BLOCKS = 1024
#: Fewer blocks give no spread worth a verdict; as many are the longest ones that are compared.
_LEAST_BLOCKS = 8
#: Quantile of 99 % of the normal distribution.
_QUANTILE = 2.326


class MetricOfTexts(Protocol):
    """A metric that is a function of the mean loss per token over all texts."""

    def text_losses(self) -> tuple[Sequence[float], Sequence[float]]:
        """Return the sum of losses and the number of tokens of every text, in order."""

    def at_loss(self, loss: float) -> float:
        """Return the result for a mean loss per token."""


@dataclass(frozen=True)
class TextLosses:
    """Losses of texts, or of blocks of neighbouring texts.

    Attributes:
        sums: the sum of losses of each.
        counts: the number of tokens of each.
    """

    sums: tuple[float, ...]
    counts: tuple[float, ...]

    @classmethod
    def from_metric(cls, metric: MetricOfTexts) -> TextLosses:
        """Return the losses of the texts that a metric received."""
        sums, counts = (np.asarray(values, np.float64) for values in metric.text_losses())
        starts = np.arange(0, len(sums), -(-len(sums) // _MOST_BLOCKS) or 1)
        if len(starts):
            sums, counts = np.add.reduceat(sums, starts), np.add.reduceat(counts, starts)
        return cls(tuple(sums.tolist()), tuple(counts.tolist()))

    def bound_mean_over(self, baseline: TextLosses) -> float | None:
        """Return the 99 % bound of the mean loss on as many other texts of the same kind.

        Their mean varies as that of these texts does, so the difference varies √2 times as much.
        The increase of the loss is the ratio of two sums over texts (Cochran, "Sampling
        Techniques", 1977, section 6.4). Neighbouring texts, e.g. windows of one file, are alike,
        so that their mean varies more than that of texts drawn one by one: of the spreads of
        single texts and of blocks of neighbours, the widest counts (Künsch, "The jackknife and the
        bootstrap for general stationary observations", Ann. Statist. 17, 1989). None if the texts
        are too few, or not the same.
        """
        texts = len(self.sums)
        if texts < _LEAST_BLOCKS or self.counts != baseline.counts:
            return None
        counts = np.array(self.counts)
        changes = np.array(self.sums) - np.array(baseline.sums)
        rest = changes - changes.sum() / counts.sum() * counts
        lengths = {1, round(texts ** (1 / 3)), texts // _LEAST_BLOCKS}
        margin = (
            np.sqrt(2) * max(_block_sum_quantile(rest, length) for length in lengths) / counts.sum()
        )
        bound = float(np.sum(self.sums) / counts.sum() + margin)
        return bound if np.isfinite(bound) else None


def _block_sum_quantile(rest: Floats, length: int) -> float:
    """Return the 99 % quantile of the sum of as many values, from blocks of `length` neighbours."""
    blocks = len(rest) // length
    # Values left over join the last block.
    sums = np.add.reduceat(rest, np.arange(0, blocks * length, length))
    spread = np.square(sums).sum() * blocks / (blocks - 1)
    # The quantile of Student's t (Abramowitz and Stegun, 26.7.5).
    z, freedom = _QUANTILE, blocks - 1
    second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
    quantile = z + (z**3 + z) / (4 * freedom) + second
    return float(quantile * np.sqrt(spread))


def metric_of_texts(metrics: Sequence[tuple[Any, float]]) -> MetricOfTexts | None:
    """Return the only metric, if it is one of texts with weight 1."""
    if len(metrics) != 1 or metrics[0][1] != 1 or not hasattr(metrics[0][0], "text_losses"):
        return None
    metric: MetricOfTexts = metrics[0][0]
    return metric
