"""Calibration ranges of tensors from their observed statistics, independent of frameworks.

Memory is bounded: extremes and channel powers are running values, and the algorithms that clip use
a fixed-size, evenly spread sample.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.observations import ChannelStats, Observations, Range
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.errors import ConversionError

#: Sampled values of one tensor over all batches.
SAMPLE_LIMIT = 32768
#: Sampled values of one batch.
SAMPLES_PER_BATCH = 4096
#: Steps of an 8-bit scale.
LEVELS = 255
#: Narrower ranges count as empty: float32 cannot divide by their step.
MIN_RANGE_WIDTH = 1e-30
#: Fractions of the largest magnitude tried as clipping limits.
_CLIP_FRACTIONS = np.linspace(1.0, 0.05, 96)
#: Stride of the coarse search over these fractions; a full search costs too much time.
_COARSE_STEP = 8
_KL_BINS = 2048
#: Minimum NSR and maximum number of tensors whose channels are kept: observations are stored in
#: files, with thousands of numbers per tensor.
_MIN_CHANNEL_NSR, _MAX_CHANNEL_TENSORS = 0.01, 32
#: Floor against the infinite logarithm of an empty level.
_MIN_LEVEL_FRACTION = 1e-12

#: Values of a row in reductions of columns.
_ROW_VALUES = 4096

Floats = NDArray[np.floating]


@lru_cache(maxsize=1)
def sample_fractions() -> Floats:
    """Return sample positions as fractions of the length of a flattened tensor.

    One position per sample, jittered within equal parts of the tensor: small tensors are sampled
    completely, and a fixed stride could alias with an axis and hit only some channels.
    """
    parts = np.arange(SAMPLES_PER_BATCH) + np.random.default_rng(0).random(SAMPLES_PER_BATCH)
    return np.asarray(parts / SAMPLES_PER_BATCH)


@lru_cache(maxsize=256)
def _sample_positions(size: int) -> NDArray[np.int64]:
    """Return the positions of `sample_fractions` in a tensor of a size."""
    return (sample_fractions() * size).astype(np.int64)


@lru_cache(maxsize=8)
def _random_half(count: int) -> NDArray[np.integer]:
    """Return the positions of a random half of some values, always the same."""
    return np.random.default_rng(0).permutation(count)[::2]


def affine_parameters(low: float, high: float) -> tuple[float, int]:
    """Return scale and zero point of uint8 for the range [low, high], widened to include 0.

    Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018, section 2.1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    # For an all-zero tensor, any scale is correct.
    scale = (high - low) / LEVELS if high - low > MIN_RANGE_WIDTH else 1.0
    return scale, min(max(round(-low / scale), 0), LEVELS)


@dataclass(frozen=True)
class BatchStats:
    """Statistics of one tensor for a part of a batch.

    Attributes:
        low: the minimum, overall or of every channel, shape [channels].
        high: the maximum, likewise.
        power: mean square of every channel, shape [channels].
        count: number of values per channel.
        sample: at most `SAMPLES_PER_BATCH` values, at the positions of `sample_fractions`.
        mean: mean of every channel, shape [channels]; corrections require the mean and the extremes
            of every channel.
    """

    low: float | Floats
    high: float | Floats
    power: Floats
    count: int
    sample: Floats
    mean: Floats | None = None


def summarized(values: Floats, channels: int = -1) -> BatchStats | None:
    """Return the statistics of an array with the channel axis `channels`; None if empty.

    A tensor with fewer than two axes has one channel.
    """
    if not values.size:
        return None
    axis, given = channels % values.ndim if values.ndim > 1 else 0, values
    if not values.flags.c_contiguous:
        moved = np.moveaxis(values, axis, -1)
        if moved.flags.c_contiguous:
            # Channels are last in memory: a view avoids the cost of a copy.
            values, axis = moved, values.ndim - 1
    with np.errstate(over="ignore", invalid="ignore"):
        if values.ndim < 2 or axis == values.ndim - 1:
            shaped: Floats = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
            low, high, power, total = _reduced_columns(shaped)
        else:
            shaped = values.reshape(int(np.prod(values.shape[:axis])), values.shape[axis], -1)
            # Products of the BLAS take half the time of numpy's sums over short rows. They come
            # first: they read from memory three times as fast as numpy's extremes.
            power = (shaped[..., None, :] @ shaped[..., None])[..., 0, 0].sum(0)
            total = (shaped @ np.ones(shaped.shape[-1], shaped.dtype)).sum(0)
            low, high = shaped.min((0, 2)), shaped.max((0, 2))
    count = values.size // len(power)
    return BatchStats(low, high, power / count, count, _sampled(given), total / count)


def _sampled(values: Floats) -> Floats:
    """Return the values at the positions of `sample_fractions`."""
    positions = _sample_positions(values.size)
    if values.flags.c_contiguous:
        return values.reshape(-1)[positions]
    return values[np.unravel_index(positions, values.shape)]


def _reduced_columns(values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return minimum, maximum, sum of squares and sum of every column of a matrix.

    Rows are reduced several at a time: numpy takes up to 20 times as long for narrow rows.
    """
    rows, columns = values.shape
    together = min(max(_ROW_VALUES // columns, 1), rows)
    split = rows - rows % together
    wide, rest = values[:split].reshape(-1, together * columns), values[split:]
    total = np.ones(rows, values.dtype) @ values  # first, see `summarized`
    power = np.einsum("xc,xc->c", wide, wide).reshape(together, -1).sum(0)
    low, high = wide.min(0).reshape(together, -1), wide.max(0).reshape(together, -1)
    return (
        np.concatenate([low, rest]).min(0),
        np.concatenate([high, rest]).max(0),
        power + np.einsum("xc,xc->c", rest, rest),
        total,
    )


@dataclass
class Observer:
    """Running statistics of one tensor over batches; `values` is its total number of elements."""

    low: float = np.inf
    high: float = -np.inf
    _power: Floats | None = None
    _extremes: tuple[Floats, Floats] | None = None
    _mean: Floats | None = None
    _count: int = 0
    values: int = 0
    _samples: list[Floats] = field(default_factory=list)
    _stride: int = 1
    _batches: int = 0

    def update(self, seen: BatchStats) -> None:
        """Update with the statistics of a part of a batch."""
        low, high, channel_power, mean = seen.low, seen.high, seen.power, seen.mean
        count, sample = seen.count, seen.sample
        self.values += count * len(channel_power)
        self.low, self.high = min(self.low, float(np.min(low))), max(self.high, float(np.max(high)))
        known = mean is not None and channel_power.ndim == 1
        known = known and np.shape(low) == np.shape(high) == channel_power.shape
        extremes = (np.asarray(low, np.float64), np.asarray(high, np.float64)) if known else None
        if self._power is None or self._power.shape != channel_power.shape:
            self._power, self._count = channel_power.astype(np.float64), count
            self._extremes = extremes
            self._mean = np.asarray(mean, np.float64) if known else None
        else:
            total = self._count + count
            self._power += (channel_power - self._power) * (count / total)
            if extremes is not None and self._extremes is not None and self._mean is not None:
                self._extremes = (
                    np.minimum(self._extremes[0], extremes[0]),
                    np.maximum(self._extremes[1], extremes[1]),
                )
                self._mean += (np.asarray(mean) - self._mean) * (count / total)
            self._count = total
        if self._batches % self._stride == 0:
            self._samples.append(np.ravel(sample))
            if sum(map(len, self._samples)) > SAMPLE_LIMIT:
                # Keep half of the values, and only every second batch from now on.
                values = self._sample
                kept = values[_random_half(len(values))]
                self._samples, self._stride = [kept], self._stride * 2
        self._batches += 1

    @property
    def _sample(self) -> Floats:
        return np.concatenate([np.empty(0, np.float32), *self._samples])

    @property
    def noise(self) -> float:
        """NSR of full-range 8-bit quantization, averaged over channels.

        Rounding errors are uniform within one step, so their power is step²/12; a channel much
        smaller than a step is lost entirely and counts as 1. The average is over ratios, not
        energies: one large channel must not hide many small channels.
        """
        return 0.0 if self._power is None else channel_nsr(self.low, self.high, self._power)

    @property
    def channel_noise(self) -> float:
        """NSR of 8-bit quantization with a scale per channel, averaged over channels."""
        if self._power is None or self._extremes is None:
            return self.noise
        low, high = self._extremes
        width = np.maximum(high, 0.0) - np.minimum(low, 0.0)
        step = np.where(width > MIN_RANGE_WIDTH, width / LEVELS, 1.0)
        noise = step**2 / 12 / np.where(self._power > 0, self._power, np.inf)
        return float(np.minimum(1.0, noise).mean())

    @property
    def channels(self) -> ChannelStats | None:
        """Statistics of every channel; None if they were not recorded."""
        if self._power is None or self._extremes is None or self._mean is None:
            return None
        values = (*self._extremes, self._power, self._mean)
        # Squares of values beyond 1e19 overflow float32, which rules out corrections.
        if not all(np.isfinite(array).all() for array in values):
            return None
        return ChannelStats(*(tuple(map(_rounded, array.tolist())) for array in values))

    def ranges(self) -> dict[str, Range]:
        """Return calibration algorithm → the range that it chooses."""
        full, sample = (min(float(self.low), 0.0), max(float(self.high), 0.0)), self._sample
        choosers = {
            "minmax": lambda: full,
            "percentile": lambda: _percentile(sample),
            "kl": lambda: _kl(sample, full),
            "mse": lambda: _mse(sample, full),
        }
        return {name: choosers[name]() for name in RANGE_ALGORITHMS}


def channel_nsr(low: float, high: float, power: Floats) -> float:
    """Return the NSR of 8-bit quantization over [low, high], averaged over channels.

    `power` is the mean square of every channel.
    """
    live = power[power > 0]
    if not live.size:
        return 0.0
    scale, _ = affine_parameters(low, high)
    return float(np.minimum(1.0, scale**2 / 12 / live).mean())


def _rounded(value: float) -> float:
    """Round to six significant digits, for files."""
    return float(f"{value:.6g}")


def summarize(
    statistics: dict[str, Observer], samples: int, by_channel: Collection[str] = ()
) -> Observations:
    """Return the observations for strategies and conversion from all tensor statistics.

    Args:
        statistics: tensor → its statistics.
        samples: number of samples.
        by_channel: tensors that kernels read with a scale per channel.

    Raises:
        ConversionError: a tensor held NaN or Inf.
    """
    for name, found in statistics.items():
        if not (np.isfinite(found.low) and np.isfinite(found.high)):
            raise ConversionError(
                f"tensor {name!r} must be finite on the calibration data, got NaN or Inf; check "
                f"the model and its inputs"
            )
    noise = {
        name: found.channel_noise if name in by_channel else found.noise
        for name, found in statistics.items()
    }
    worst = sorted((n for n in noise if noise[n] > _MIN_CHANNEL_NSR), key=lambda n: -noise[n])
    kept = dict.fromkeys([*worst[:_MAX_CHANNEL_TENSORS], *by_channel])
    channels = {name: statistics[name].channels for name in kept if name in statistics}
    return Observations(
        {name: found.ranges() for name, found in statistics.items()},
        noise,
        samples,
        {name: found for name, found in channels.items() if found is not None},
        elements={name: found.values / max(samples, 1) for name, found in statistics.items()},
    )


def _percentile(sample: Floats, tail: float = 0.01) -> Range:
    low, high = np.percentile(sample, [tail, 100 - tail])
    return min(float(low), 0.0), max(float(high), 0.0)


def _clipped(full: Range, fraction: float) -> Range:
    """Return the range cut to a fraction of its largest magnitude on either side."""
    limit = fraction * max(-full[0], full[1])
    return max(full[0], -limit), min(full[1], limit)


def _mse(sample: Floats, full: Range) -> Range:
    """Return the clipped range with the least squared quantization error on the sample."""

    def error(index: int) -> float:
        scale, zero = affine_parameters(*_clipped(full, _CLIP_FRACTIONS[index]))
        stored = sample * np.float32(1 / scale)
        np.rint(stored, out=stored)
        np.clip(stored, -zero, LEVELS - zero, out=stored)
        stored *= np.float32(scale)
        stored -= sample
        return float(np.dot(stored, stored))

    # The error is unimodal: it falls with finer steps, then rises with more clipping.
    coarse = min(range(0, len(_CLIP_FRACTIONS), _COARSE_STEP), key=error)
    around = range(
        max(coarse - _COARSE_STEP + 1, 0), min(coarse + _COARSE_STEP, len(_CLIP_FRACTIONS))
    )
    return _clipped(full, float(_CLIP_FRACTIONS[min(around, key=error)]))


def _kl(sample: Floats, full: Range) -> Range:
    """Return the clipped range with the least Kullback-Leibler divergence.

    Migacz, "8-bit Inference with TensorRT", GTC 2017: the clipped histogram, with outliers moved to
    the edge bins, against its quantization to 256 levels. Zeros are excluded, as in its
    implementations: they are exact at every scale, and after a ReLU they would dominate all other
    values.
    """
    sample = sample[sample != 0]
    counts, edges = np.histogram(sample, bins=_KL_BINS, range=full if full[0] < full[1] else None)
    centres = (edges[:-1] + edges[1:]) / 2
    limits = np.array([_clipped(full, fraction) for fraction in _CLIP_FRACTIONS])
    start = np.searchsorted(centres, limits[:, 0], "left")
    stop = np.searchsorted(centres, limits[:, 1], "right")
    enough = stop - start > LEVELS
    if not enough.any():
        return full
    divergences = _divergences(counts, start[enough], stop[enough])
    return _clipped(full, float(_CLIP_FRACTIONS[enough][np.argmin(divergences)]))


def _divergences(counts: Floats, start: NDArray[np.integer], stop: NDArray[np.integer]) -> Floats:
    """Return, for each cut [start, stop) of a histogram, the divergence from its 256 levels.

    Clipped values count in the first and last kept bin. A level is the average of its non-empty
    bins, computed from the kept bins only.

    At least 256 bins must be kept. The divergence is Σ p·ln(p / q) over the kept bins.
    """
    counts = counts.astype(np.float64)
    first, last = counts[start], counts[stop - 1]
    below, above = _sums(counts, 0, start), _sums(counts, stop, len(counts))
    # Level l of w bins begins at bin ⌈l·w / 256⌉.
    widths = (stop - start)[:, None]
    borders = start[:, None] + -(-np.arange(LEVELS + 2) * widths // (LEVELS + 1))
    kept = _sums(counts, borders[:, :-1], borders[:, 1:])
    filled = _sums(counts > 0, borders[:, :-1], borders[:, 1:])
    fraction = kept / np.maximum(filled, 1) / np.maximum(kept.sum(axis=1, keepdims=True), 1e-12)
    cost = np.log(np.maximum(fraction, _MIN_LEVEL_FRACTION))
    total = counts.sum()
    own = _sums(_x_log_x(counts), start, stop)
    own += _x_log_x(first + below) - _x_log_x(first) + _x_log_x(last + above) - _x_log_x(last)
    crossed = (kept * cost).sum(axis=1)
    # An edge bin that was empty before clipping is not part of its level.
    crossed += below * np.where(first > 0, cost[:, 0], np.log(_MIN_LEVEL_FRACTION))
    crossed += above * np.where(last > 0, cost[:, -1], np.log(_MIN_LEVEL_FRACTION))
    return np.asarray((own - crossed) / total - np.log(total))


def _sums(values: NDArray[Any], start: int | NDArray[Any], stop: int | NDArray[Any]) -> Floats:
    """Return the sums of values[start:stop] for every pair of bounds."""
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(running[stop] - running[start])


def _x_log_x(values: Floats) -> Floats:
    return np.asarray(values * np.log(np.maximum(values, 1.0)))
