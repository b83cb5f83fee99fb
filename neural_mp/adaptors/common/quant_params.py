"""How real numbers are stored as integers: activations as uint8, weights as int8."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.calibration import LEVELS, MIN_RANGE_WIDTH, affine_parameters
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


@dataclass(frozen=True)
class QuantParams:
    """How a tensor is stored in uint8: real = scale · (stored - zero_point)."""

    scale: float
    zero_point: int

    @classmethod
    def of(cls, span: Range) -> QuantParams:
        """The encoding that holds a range, and zero exactly."""
        return cls(*affine_parameters(*span))

    @property
    def low(self) -> float:
        """The least real number that can be stored."""
        return -self.zero_point * self.scale

    @property
    def high(self) -> float:
        """The greatest real number that can be stored."""
        return (LEVELS - self.zero_point) * self.scale

    def clamps(self, low: float, high: float) -> bool:
        """Whether nothing outside of limits can be stored, but for half a step."""
        slack = self.scale * (0.5 + 1e-3)
        return self.low >= low - slack and self.high <= high + slack


def exceeds_reduced_range(integers: Array) -> bool:
    """Whether a weight in int8 goes beyond ±63, so that saturating products make it wrong."""
    return bool((np.abs(integers.astype(np.int16)) > WEIGHT_LIMITS[REDUCED_RANGE]).any())


def weight_scales(weight: Array, axes: tuple[int, ...], limit: int) -> Array:
    """The step of every output channel, symmetric: the largest magnitude over `limit`.

    Args:
        weight: the weight.
        axes: its axes other than those of the output channels.
        limit: the largest integer, 127 or 63.

    Returns:
        Float32 with the axes of the weight, of length 1 where they are in `axes`. A channel that
        is zero everywhere may have any step, and has 1.
    """
    # Without a copy of all magnitudes, for weights of hundreds of megabytes.
    highest = weight.max(axis=axes, keepdims=True, initial=0)
    largest = np.maximum(highest, -weight.min(axis=axes, keepdims=True, initial=0))
    return np.where(largest > MIN_RANGE_WIDTH, largest / limit, 1).astype(np.float32)


def weight_limit_of(space: TuningSpace, op: str) -> int:
    """The largest integer that the weight of an op is stored with, unless a plan says otherwise."""
    config = space.capabilities[op].config(Precision.INT8)
    return weight_qmax(config.weight if config is not None else None)


def round_to_int8(weight: Array, scales: Array, limit: int) -> NDArray[np.int8]:
    """A weight in steps of `scales`, cut off at ±`limit`."""
    steps = weight / scales
    np.rint(steps, out=steps)
    return np.clip(steps, -limit, limit, out=steps).astype(np.int8)


L = TypeVar("L")


@dataclass(frozen=True)
class IntegerWeight(Generic[L]):
    """A weight in int8 that an integer kernel multiplies by.

    Attributes:
        layer: what reads it, as the framework has it.
        kernel: the kind of the kernel.
        integers: the weight.
    """

    layer: L
    kernel: KernelKind
    integers: Array


def wide_kinds(weights: Iterable[IntegerWeight[L]]) -> frozenset[KernelKind]:
    """The kinds of kernel that have a weight beyond ±63."""
    return frozenset(weight.kernel for weight in weights if exceeds_reduced_range(weight.integers))


def saturating(weights: Iterable[IntegerWeight[L]]) -> list[L]:
    """The layers with such a weight, of the kinds that are not exact on every processor."""
    found = (weight for weight in weights if weight.kernel not in EXACT_EVERYWHERE)
    return [weight.layer for weight in found if exceeds_reduced_range(weight.integers)]
