"""Quantization of tensors, activations to uint8 and weights to int8, and the ranges of tensors.

Scales cover ranges, which calibration algorithms choose.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.core.int8_accumulation import (
    EXACT_EVERYWHERE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    KernelKind,
    weight_qmax,
)
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import RANGE_ALGORITHMS
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array

#: Steps of an 8-bit scale.
STEPS = 255
#: Narrower ranges count as empty: float32 cannot divide by their step.
MIN_RANGE_WIDTH = 1e-30
#: Fractions of the largest magnitude tried as clipping limits.
_CLIP_FRACTIONS = np.linspace(1.0, 0.05, 96)
#: Stride of the coarse search over these fractions; a full search costs too much time.
_COARSE_STEP = 8
#: Percentage of values that is clipped at either end.
_TAIL_PERCENT = 0.01
_KL_BINS = 2048
#: Floor against the infinite logarithm of an empty level.
_MIN_LEVEL_FRACTION = 1e-12

Floats = NDArray[np.floating]
#: The uint8 number at the place of 0 in int8.
MIDDLE = 128


def compute_affine_parameters(low: float, high: float) -> tuple[float, int]:
    """Return scale and zero point of uint8 for the range [low, high], widened to include 0.

    Jacob et al., "Quantization and Training of Neural Networks for Efficient
    Integer-Arithmetic-Only Inference", 2018, section 2.1.
    """
    low, high = min(low, 0.0), max(high, 0.0)
    # For an all-zero tensor, any scale is correct.
    scale = (high - low) / STEPS if high - low > MIN_RANGE_WIDTH else 1.0
    return scale, min(max(round(-low / scale), 0), STEPS)


def choose_tensor_ranges(sample: Floats, low: float, high: float) -> dict[str, Range]:
    """Return calibration algorithm → the range that it chooses, with 0 within.

    From a finite sample of the tensor's values, and its minimum and maximum, widened to include 0.
    """
    if high - low <= MIN_RANGE_WIDTH:
        return dict.fromkeys(RANGE_ALGORITHMS, (low, high))
    # The largest magnitude becomes 0.5 to 1, exactly, as products of extreme values overflow, and
    # bins of tiny ranges vanish.
    exponent = math.frexp(max(-low, high))[1]
    sample = np.ldexp(sample, -exponent)
    full = math.ldexp(low, -exponent), math.ldexp(high, -exponent)
    choosers = {
        "minmax": lambda: full,
        "percentile": lambda: _choose_percentile_range(sample, full),
        "kl": lambda: _least_kl_range(sample, full),
        "mse": lambda: _least_mse_range(sample, full),
    }
    chosen = {name: choosers[name]() for name in RANGE_ALGORITHMS}
    return {
        name: (math.ldexp(least, exponent), math.ldexp(most, exponent))
        for name, (least, most) in chosen.items()
    }


def _choose_percentile_range(sample: Floats, full: Range) -> Range:
    if not sample.size:
        return full
    low, high = np.percentile(sample, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return min(float(low), 0.0), max(float(high), 0.0)


def _clip_range(full: Range, fraction: float) -> Range:
    """Return the range cut to a fraction of its largest magnitude on either side."""
    limit = fraction * max(-full[0], full[1])
    return max(full[0], -limit), min(full[1], limit)


def _least_mse_range(sample: Floats, full: Range) -> Range:
    def squared_error(index: int) -> float:
        scale, zero = compute_affine_parameters(*_clip_range(full, _CLIP_FRACTIONS[index]))
        stored = sample * np.float32(1 / scale)
        np.rint(stored, out=stored)
        np.clip(stored, -zero, STEPS - zero, out=stored)
        stored *= np.float32(scale)
        stored -= sample
        return float(np.dot(stored, stored))

    # The error is unimodal: it falls with finer steps, then rises with more clipping.
    coarse = min(range(0, len(_CLIP_FRACTIONS), _COARSE_STEP), key=squared_error)
    around = range(
        max(coarse - _COARSE_STEP + 1, 0), min(coarse + _COARSE_STEP, len(_CLIP_FRACTIONS))
    )
    return _clip_range(full, float(_CLIP_FRACTIONS[min(around, key=squared_error)]))


def _least_kl_range(sample: Floats, full: Range) -> Range:
    """Return the clipped range with the least Kullback-Leibler divergence.

    Migacz, "8-bit Inference with TensorRT", GTC 2017: the clipped histogram, with outliers moved to
    the edge bins, against its quantization to 256 levels. Zeros are excluded, as in its
    implementations: they are exact at every scale, and after a ReLU they would dominate all other
    values.
    """
    sample = sample[sample != 0]
    if not sample.size:
        return full
    counts, edges = np.histogram(sample, bins=_KL_BINS, range=full)
    centres = (edges[:-1] + edges[1:]) / 2
    limits = np.array([_clip_range(full, fraction) for fraction in _CLIP_FRACTIONS])
    start = np.searchsorted(centres, limits[:, 0], "left")
    stop = np.searchsorted(centres, limits[:, 1], "right")
    enough = stop - start > STEPS
    if not enough.any():
        return full
    divergences = _compute_kl_divergences(counts, start[enough], stop[enough])
    return _clip_range(full, float(_CLIP_FRACTIONS[enough][np.argmin(divergences)]))


def _compute_kl_divergences(
    counts: Floats, start: NDArray[np.integer], stop: NDArray[np.integer]
) -> Floats:
    """Return, for each cut [start, stop) of a histogram, the divergence from its 256 levels.

    Clipped values count in the first and last kept bin. A level is the average of its non-empty
    bins, computed from the kept bins only, at least 256. The divergence is Σ p·ln(p / q) over them.
    """
    counts = counts.astype(np.float64)
    first, last = counts[start], counts[stop - 1]
    below, above = _sum_slices(counts, 0, start), _sum_slices(counts, stop, len(counts))
    # Level l of w bins begins at bin ⌈l·w / 256⌉.
    widths = (stop - start)[:, None]
    borders = start[:, None] + -(-np.arange(STEPS + 2) * widths // (STEPS + 1))
    sums = _sum_slices(counts, borders[:, :-1], borders[:, 1:])
    filled = _sum_slices(counts > 0, borders[:, :-1], borders[:, 1:])
    fraction = sums / np.maximum(filled, 1) / np.maximum(sums.sum(axis=1, keepdims=True), 1e-12)
    cost = np.log(np.maximum(fraction, _MIN_LEVEL_FRACTION))
    total = counts.sum()
    own = _sum_slices(_x_log_x(counts), start, stop)
    own += _x_log_x(first + below) - _x_log_x(first) + _x_log_x(last + above) - _x_log_x(last)
    crossed = (sums * cost).sum(axis=1)
    # An edge bin that was empty before clipping is not part of its level.
    crossed += below * np.where(first > 0, cost[:, 0], np.log(_MIN_LEVEL_FRACTION))
    crossed += above * np.where(last > 0, cost[:, -1], np.log(_MIN_LEVEL_FRACTION))
    return np.asarray((own - crossed) / total - np.log(total))


def _sum_slices(
    values: NDArray[Any], start: int | NDArray[Any], stop: int | NDArray[Any]
) -> Floats:
    running = np.concatenate([[0.0], np.cumsum(values, dtype=np.float64)])
    return np.asarray(running[stop] - running[start])


def _x_log_x(values: Floats) -> Floats:
    return np.asarray(values * np.log(np.maximum(values, 1.0)))


@dataclass(frozen=True)
class QuantParams:
    """uint8 parameters of a tensor: float = scale · (quantized - zero_point)."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, span: Range) -> QuantParams:
        """Return the parameters that cover a range, with an exact zero."""
        return cls(*compute_affine_parameters(*span))

    @classmethod
    def signed(cls, span: Range) -> QuantParams:
        """Return the parameters that cover a range as int8 does, without a zero point."""
        return cls((max(map(abs, span)) or 1.0) / (STEPS - MIDDLE), MIDDLE)

    @property
    def low(self) -> float:
        """The smallest representable number."""
        return -self.zero_point * self.scale

    @property
    def high(self) -> float:
        """The largest representable number."""
        return (STEPS - self.zero_point) * self.scale

    def clamps_to(self, low: float, high: float) -> bool:
        """Whether all representable numbers are within limits, up to half a step."""
        slack = self.scale * (0.5 + 1e-3)
        return self.low >= low - slack and self.high <= high + slack


def exceeds_reduced_range(integers: Array) -> bool:
    """Whether an int8 weight exceeds ±63, so that saturation makes results wrong."""
    return bool((np.abs(integers.astype(np.int16)) > WEIGHT_LIMITS[REDUCED_RANGE]).any())


def weight_scales(weight: Array, axes: tuple[int, ...], limit: int) -> Array:
    """Return the symmetric scale of every output channel: largest magnitude / `limit`.

    Float32 with the axes of the weight, of length 1 for `axes`, all except those of the output
    channels. The scale of an all-zero channel is arbitrary: 1.
    """
    # No copy of all magnitudes, as weights can have hundreds of megabytes.
    highest = weight.max(axis=axes, keepdims=True, initial=0)
    largest = np.maximum(highest, -weight.min(axis=axes, keepdims=True, initial=0))
    return np.where(largest > MIN_RANGE_WIDTH, largest / limit, 1).astype(np.float32)


def weight_limit_of(space: TuningSpace, op: str) -> int:
    """Return the largest integer of an op's weight, unless a plan overrides it."""
    config = space.capabilities[op].config(Precision.INT8)
    return weight_qmax(config.weight if config is not None else None)


def round_to_int8(weight: Array, scales: Array, limit: int) -> NDArray[np.int8]:
    """Return a weight in steps of `scales`, clipped at ±`limit`."""
    steps = weight / scales
    np.rint(steps, out=steps)
    return np.clip(steps, -limit, limit, out=steps).astype(np.int8)


#: A framework's op.
L = TypeVar("L")


@dataclass(frozen=True)
class IntegerWeight(Generic[L]):
    """An int8 weight of an integer kernel, and the layer that reads it."""

    layer: L
    kernel: KernelKind
    integers: Array


def kinds_beyond_7_bits(weights: Iterable[IntegerWeight[L]]) -> frozenset[KernelKind]:
    """Return the kinds of kernel that have a weight beyond ±63."""
    return frozenset(weight.kernel for weight in weights if exceeds_reduced_range(weight.integers))


def find_saturating_layers(weights: Iterable[IntegerWeight[L]]) -> list[L]:
    """Return the layers with weights beyond ±63 and a kernel not exact on every CPU."""
    candidates = (weight for weight in weights if weight.kernel not in EXACT_EVERYWHERE)
    return [weight.layer for weight in candidates if exceeds_reduced_range(weight.integers)]
