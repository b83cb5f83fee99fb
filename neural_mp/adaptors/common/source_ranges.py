"""Ranges that a model itself declares for its tensors, e.g. by fake quantization in training."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from neural_mp.adaptors.common.calibration import BatchStats
from neural_mp.core.observations import Range


def in_source_range(stats: BatchStats, span: Range | None) -> BatchStats:
    """Return statistics clipped and widened to a declared range; unchanged if there is none."""
    if span is None:
        return stats
    low, high = (np.clip(np.atleast_1d(end), *span) for end in (stats.low, stats.high))
    low[low.argmin()], high[high.argmax()] = span
    return replace(stats, low=low, high=high, sample=np.clip(stats.sample, *span))
