"""Quantization of tensors: activations to uint8, weights to int8."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.ranges import MIN_RANGE_WIDTH, STEPS, compute_affine_parameters
from neural_mp.core.int8_accumulation import (
    EXACT_EVERYWHERE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    KernelKind,
    weight_qmax,
)
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array

#: The uint8 number at the place of 0 in int8.
MIDDLE = 128


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
