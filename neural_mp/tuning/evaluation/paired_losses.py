"""Bound of a language model's accuracy on texts other than those evaluated.

A plan and FP32 are evaluated on the same texts, so their losses are compared text by text: the
spread of the differences is far smaller than that of the losses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

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
    def of(cls, metric: MetricOfTexts) -> TextLosses:
        """Return the losses of the texts that a metric received."""
        sums, counts = (np.asarray(values, np.float64) for values in metric.text_losses())
        starts = np.arange(0, len(sums), -(-len(sums) // _MOST_BLOCKS) or 1)
        if len(starts):
            sums, counts = np.add.reduceat(sums, starts), np.add.reduceat(counts, starts)
        return cls(tuple(sums.tolist()), tuple(counts.tolist()))

    def bound_over(self, baseline: TextLosses) -> float | None:
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
