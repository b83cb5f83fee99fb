"""Inputs and statistics of tensors in calibration, independent of frameworks.

Memory is bounded: extremes and channel powers are running values, and the algorithms that clip use
a fixed-size, evenly spread sample.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import (
    MIN_RANGE_WIDTH,
    STEPS,
    choose_tensor_ranges,
    compute_affine_parameters,
)
from neural_mp.core.observations import (
    ChannelStats,
    NaNSamples,
    NonFiniteTensor,
    Observations,
    Range,
)
from neural_mp.errors import ConversionError, DataError
from neural_mp.util.pytree import (
    Array,
    batch_size_of,
    list_float_arrays,
    named_float_arrays,
    with_samples,
)

#: Sampled values of one tensor over all batches.
SAMPLE_LIMIT = 32768
#: Sampled values of one batch.
SAMPLES_PER_BATCH = 4096
#: Minimum NSR and maximum number of tensors whose channels are kept: observations are stored in
#: files, with thousands of numbers per tensor.
_MIN_CHANNEL_NSR, _MAX_CHANNEL_TENSORS = 0.01, 32

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
    return (sample_fractions() * size).astype(np.int64)


@lru_cache(maxsize=8)
def _random_half_positions(count: int) -> NDArray[np.integer]:
    """Return the positions of a half of the values, always the same."""
    return np.random.default_rng(0).permutation(count)[::2]


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

    @property
    def non_finite(self) -> str:
        """`NaN` or `Inf` if the values hold one of them, else an empty text.

        Squares of large finite values are infinite in float32, but never NaN; minima and maxima of
        some runtimes pass over NaN.
        """
        ends = np.asarray([np.min(self.low), np.max(self.high)])
        if np.isnan(ends).any() or np.isnan(self.power).any():
            return "NaN"
        return "Inf" if np.isinf(ends).any() else ""


def summarized(values: Floats, channels: int = -1) -> BatchStats | None:
    """Return the statistics of an array with the channel axis `channels`; None if empty.

    A tensor with fewer than two axes has one channel.
    """
    if not values.size:
        return None
    axis, original = channels % values.ndim if values.ndim > 1 else 0, values
    if not values.flags.c_contiguous:
        moved = np.moveaxis(values, axis, -1)
        if moved.flags.c_contiguous:
            # Channels are last in memory: a view avoids the cost of a copy.
            values, axis = moved, values.ndim - 1
    with np.errstate(over="ignore", invalid="ignore"):
        if values.ndim < 2 or axis == values.ndim - 1:
            shaped: Floats = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
            low, high, power, total = _reduce_matrix_columns(shaped)
        else:
            shaped = values.reshape(int(np.prod(values.shape[:axis])), values.shape[axis], -1)
            # Products of the BLAS take half the time of numpy's sums over short rows. They come
            # first: they read from memory three times as fast as numpy's extremes.
            power = (shaped[..., None, :] @ shaped[..., None])[..., 0, 0].sum(0)
            total = (shaped @ np.ones(shaped.shape[-1], shaped.dtype)).sum(0)
            low, high = shaped.min((0, 2)), shaped.max((0, 2))
    count = values.size // len(power)
    return BatchStats(low, high, power / count, count, _sample_values(original), total / count)


def _sample_values(values: Floats) -> Floats:
    positions = _sample_positions(values.size)
    if values.flags.c_contiguous:
        return values.reshape(-1)[positions]
    return values[np.unravel_index(positions, values.shape)]


def _reduce_matrix_columns(values: Floats) -> tuple[Floats, Floats, Floats, Floats]:
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
    """Running statistics of one tensor over batches.

    Attributes:
        values: total number of elements.
        non_finite: the first NaN or Inf; the other statistics are then those of finite parts.
    """

    low: float = np.inf
    high: float = -np.inf
    _power: Floats | None = None
    _extremes: tuple[Floats, Floats] | None = None
    _mean: Floats | None = None
    _count: int = 0
    values: int = 0
    non_finite: NonFiniteTensor | None = None
    _samples: list[Floats] = field(default_factory=list)
    _stride: int = 1
    _batches: int = 0

    def update(self, stats: BatchStats, batch: int = 1) -> None:
        """Update with the statistics of a part of a batch, given the number of the batch."""
        low, high, channel_power, mean = stats.low, stats.high, stats.power, stats.mean
        count, sample = stats.count, stats.sample
        self.values += count * len(channel_power)
        if stats.non_finite:
            self.non_finite = self.non_finite or NonFiniteTensor(stats.non_finite, batch)
            return
        self.low, self.high = min(self.low, float(np.min(low))), max(self.high, float(np.max(high)))
        is_complete = mean is not None and channel_power.ndim == 1
        is_complete = is_complete and np.shape(low) == np.shape(high) == channel_power.shape
        extremes = (
            (np.asarray(low, np.float64), np.asarray(high, np.float64)) if is_complete else None
        )
        if self._power is None or self._power.shape != channel_power.shape:
            self._power, self._count = channel_power.astype(np.float64), count
            self._extremes = extremes
            self._mean = np.asarray(mean, np.float64) if is_complete else None
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
                values = self._sampled_values
                retained = values[_random_half_positions(len(values))]
                self._samples, self._stride = [retained], self._stride * 2
        self._batches += 1

    @property
    def _sampled_values(self) -> Floats:
        return np.concatenate([np.empty(0, np.float32), *self._samples])

    @property
    def noise(self) -> float:
        """NSR of full-range 8-bit quantization, averaged over channels.

        Rounding errors are uniform within one step, so their power is step²/12; a channel much
        smaller than a step is lost entirely and counts as 1. The average is over ratios, not
        energies: one large channel must not hide many small channels.
        """
        return 0.0 if self._power is None else compute_channel_nsr(self.low, self.high, self._power)

    @property
    def channel_noise(self) -> float:
        """NSR of 8-bit quantization with a scale per channel, averaged over channels."""
        if self._power is None or self._extremes is None:
            return self.noise
        low, high = self._extremes
        width = np.maximum(high, 0.0) - np.minimum(low, 0.0)
        step = np.where(width > MIN_RANGE_WIDTH, width / STEPS, 1.0)
        noise = step**2 / 12 / np.where(self._power > 0, self._power, np.inf)
        return float(np.minimum(1.0, noise).mean())

    @property
    def channel_stats(self) -> ChannelStats | None:
        """Statistics of every channel; None if they were not recorded."""
        if self._power is None or self._extremes is None or self._mean is None:
            return None
        low, high = self._extremes
        arrays = {"low": low, "high": high, "power": self._power, "mean": self._mean}
        # Squares of values beyond 1e19 overflow float32, which rules out corrections.
        if not all(np.isfinite(array).all() for array in arrays.values()):
            return None
        return ChannelStats(
            **{
                name: tuple(float(f"{value:.6g}") for value in array.tolist())
                for name, array in arrays.items()
            }
        )

    def choose_ranges(self) -> dict[str, Range]:
        """Return calibration algorithm → the range that it chooses."""
        return choose_tensor_ranges(self._sampled_values, min(self.low, 0.0), max(self.high, 0.0))


def compute_channel_nsr(low: float, high: float, power: Floats) -> float:
    """Return the NSR of 8-bit quantization over [low, high], averaged over channels.

    `power` is the mean square of every channel.
    """
    live = power[power > 0]
    if not live.size:
        return 0.0
    scale, _ = compute_affine_parameters(low, high)
    return float(np.minimum(1.0, scale**2 / 12 / live).mean())


def summarize_observations(
    statistics: dict[str, Observer],
    samples: int,
    by_channel: Collection[str] = (),
    without_ranges: Collection[str] = (),
) -> Observations:
    """Return the observations for strategies and conversion from all tensor statistics.

    Tensors that held NaN or Inf get no range, nor do those `without_ranges`. Kernels read tensors
    `by_channel` with a scale per channel.
    """
    elements = {name: observer.values / max(samples, 1) for name, observer in statistics.items()}
    non_finite = {
        name: observer.non_finite for name, observer in statistics.items() if observer.non_finite
    }
    left_out = {*non_finite, *without_ranges}
    statistics = {name: observer for name, observer in statistics.items() if name not in left_out}
    noise = {
        name: observer.channel_noise if name in by_channel else observer.noise
        for name, observer in statistics.items()
    }
    worst = sorted((n for n in noise if noise[n] > _MIN_CHANNEL_NSR), key=lambda n: -noise[n])
    selected = dict.fromkeys([*worst[:_MAX_CHANNEL_TENSORS], *by_channel])
    channels = {name: statistics[name].channel_stats for name in selected if name in statistics}
    return Observations(
        {name: observer.choose_ranges() for name, observer in statistics.items()},
        noise,
        samples,
        {name: observer for name, observer in channels.items() if observer is not None},
        elements=elements,
        non_finite=non_finite,
    )


def in_source_range(stats: BatchStats, span: Range | None) -> BatchStats:
    """Return statistics clipped and widened to a declared range; unchanged if there is none."""
    if span is None:
        return stats
    low, high = (np.clip(np.atleast_1d(end), *span) for end in (stats.low, stats.high))
    low[low.argmin()], high[high.argmax()] = span
    return replace(stats, low=low, high=high, sample=np.clip(stats.sample, *span))


@dataclass
class CalibrationInputs:
    """An iterable of batches, in which damaged samples are replaced by others of their batch.

    NaN and Inf in inputs can be meant: a mask of -Inf, or missing values that the model replaces.
    The outputs decide: a sample with NaN in its inputs that turns outputs into NaN is damaged.
    Batches keep their shape; a batch of damaged samples alone is left out.

    Attributes:
        run: the model, from the inputs of a batch to its outputs.
        number: number of the current batch, from 1.
        samples: number of samples in the batches so far, without the damaged ones.
        damaged: input → its samples that are damaged.
    """

    batches: Iterable[Any]
    run: Callable[[Any], Any]
    number: int = 0
    samples: int = 0
    damaged: dict[str, NaNSamples] = field(default_factory=dict)
    _current: Any = None
    _used: int = 0
    #: Numbers of the batches with non-finite tensors, and the first of these batches.
    _non_finite: set[int] = field(default_factory=set)
    _example: Any = None

    def __iter__(self) -> Iterator[Any]:
        for number, batch in enumerate(self.batches, 1):
            self.number = number
            self._current = self._replace_damaged_samples(batch)
            if self._current is not None:
                self._used += 1
                yield self._current
        if self.damaged and not self._used:
            raise DataError(
                f"calibration data must hold samples without NaN, but NaN in input "
                f"{next(iter(self.damaged))!r} reaches the outputs of every sample; remove or "
                f"repair these samples"
            )

    def note_non_finite(self) -> None:
        """Note that a tensor holds NaN or Inf in the current batch."""
        if not self._non_finite:
            self._example = self._current
        self._non_finite.add(self.number)

    def check_outputs(self) -> None:
        """Check, if every batch has non-finite tensors, that outputs of the first are finite.

        Raises:
            ConversionError: no floating-point output is.
        """
        if not self._used or len(self._non_finite) < self._used:
            return
        outputs = [array for array in list_float_arrays(self.run(self._example)) if array.size]
        if outputs and not any(np.isfinite(array).any() for array in outputs):
            raise ConversionError(
                "outputs of the model must be finite on the calibration data, got only NaN or "
                "Inf; check the model and its inputs"
            )

    def _replace_damaged_samples(self, batch: object) -> Any:
        """Return a batch without damaged samples; None if there are no others."""
        size = batch_size_of(batch)
        named = named_float_arrays(batch if isinstance(batch, Mapping | list | tuple) else [batch])
        marked = ((name, _samples_with_nan(array, size)) for name, array in named.items())
        nan = {name: damaged for name, damaged in marked if damaged.any()}
        if not nan or not any(
            np.isnan(array).any() for array in list_float_arrays(self.run(batch))
        ):
            self.samples += size
            return batch
        for name, damaged in nan.items():
            first = self.damaged.get(name, NaNSamples(self.number, 0))
            self.damaged[name] = NaNSamples(first.batch, first.samples + int(damaged.sum()))
        is_whole = ~np.any(list(nan.values()), axis=0)
        self.samples += int(is_whole.sum())
        if not is_whole.any():
            return None
        chosen = np.where(is_whole, np.arange(size), np.argmax(is_whole))
        return with_samples(batch, chosen.tolist())


def _samples_with_nan(array: Array, size: int) -> Array:
    """Return for each of `size` samples whether an array holds NaN in it.

    An array with another first axis belongs to all samples.
    """
    nan = np.isnan(array)
    if array.ndim and len(array) == size:
        return np.asarray(nan.any(axis=tuple(range(1, nan.ndim))))
    return np.full(size, nan.any())
