"""Learned rounding of weights in groups: signed gradient descent on the rounding and the ranges.

Cheng et al., "Optimize Weight Rounding via Signed Gradient Descent for the Quantization of LLMs",
2023. A weight is rounded after the addition of a shift, in ranges that are scaled by a factor per
group; both follow the sign of the gradient of an error, which is passed through the rounding. The
error is that of a decoder block, as far as a framework has blocks, else of the layer alone. Descent
starts from a weight rounded otherwise, to nearest or compensated, and the best result seen on the
way counts, as roundings near a threshold alternate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.low_bit_weights import (
    Floats,
    GroupedWeight,
    max_code,
    middle_code,
    parameters_of,
)
from neural_mp.core.enums import Scheme
from neural_mp.core.quant_spec import ROUNDING_STEPS, QuantSpec
from neural_mp.util.pytree import Array

#: Smallest and largest fraction of a group's range.
_FACTORS = 0.3, 1.2
#: Steps between the threshold of a code and the place where a code that is not the nearest starts.
_PAST_THRESHOLD = 0.25


@dataclass(frozen=True)
class LearnOptions:
    """Options of learned rounding.

    Attributes:
        steps: number of steps per block.
        seed: seed of the samples of each step.
    """

    steps: int = ROUNDING_STEPS
    seed: int = 0

    def rate(self, step: int) -> float:
        """Return the size of a step; all steps together move a shift by half a step at most."""
        return (1 - step / self.steps) / self.steps


DEFAULT_LEARNING = LearnOptions()


@dataclass
class LearnedRounding:
    """A weight whose rounding is learned.

    Attributes:
        weight: float32 [outputs, inputs], of which `start` is a rounding.
        spec: bits, scheme and group size.
        start: the rounding that descent starts from; its factors of inputs stay.
        shift: float32 [outputs, inputs], added before rounding, in steps.
        low_factor, high_factor: float32 [outputs, groups], fractions of the ends of each range.
    """

    weight: Floats
    spec: QuantSpec
    start: GroupedWeight
    shift: Floats = field(init=False)
    low_factor: Floats = field(init=False)
    high_factor: Floats = field(init=False)

    def __post_init__(self) -> None:
        if self.start.input_factors is not None:
            self.weight = self.weight / self.start.input_factors
        bits, scales = self.spec.dtype.bits, self.start.scales
        self._low = self.start.offsets - middle_code(bits) * scales
        if self.spec.scheme is Scheme.SYMMETRIC:
            self._low = -(middle_code(bits) - 1) * scales
        self._high = self.start.offsets + (max_code(bits) - middle_code(bits)) * scales
        self.shift = np.zeros(self.weight.shape, np.float32)
        self.low_factor, self.high_factor = np.ones_like(scales), np.ones_like(scales)
        self._grid = self.start.scales, self.start.offsets
        # A code that is not the nearest one stays: the shift leads past the threshold.
        codes = self._grouped(self.start.codes.astype(np.float32))
        positions = np.clip(self._positions(), 0, max_code(bits))
        away = np.sign(codes - np.rint(positions))
        self._grouped(self.shift)[...] = np.where(
            away == 0, 0, codes - _PAST_THRESHOLD * away - positions
        )
        self._first_shift = self.shift.copy()

    def rounded(self) -> GroupedWeight:
        """Return the weight as rounded now."""
        scales, offsets = self._grid
        bits = self.spec.dtype.bits
        codes = np.clip(np.rint(self._positions()), 0, max_code(bits)).astype(np.uint8)
        return GroupedWeight(
            codes.reshape(self.weight.shape), scales, offsets, bits, self.start.input_factors
        )

    def descend(self, gradient: Array, rate: float) -> None:
        """Take a step against the gradient of an error by the rounded weight."""
        if self.start.input_factors is not None:
            gradient = gradient * self.start.input_factors
        bits = self.spec.dtype.bits
        along, shift = self._grouped(gradient), self._grouped(self.shift)
        positions = self._positions()
        codes = np.rint(positions)
        above, below = codes > max_code(bits), codes < 0
        inside = np.where(above | below, np.float32(0), along)
        # Where nothing is clipped, the change by the scale is that of the rounding error.
        error = np.clip(codes, 0, max_code(bits)) - (positions - shift)
        by_scale = np.einsum("ogi,ogi->og", inside, error)
        by_high, by_low = (along * above).sum(axis=2), (along * below).sum(axis=2)
        self._narrow(by_scale, by_high, by_low, rate)
        shift -= rate * np.sign(inside)
        first = self._grouped(self._first_shift)
        np.clip(shift, first - 0.5, first + 0.5, out=shift)
        self._grid = self._parameters()

    def _narrow(self, by_scale: Floats, by_high: Floats, by_low: Floats, rate: float) -> None:
        """Move the ends of the ranges, given the gradients by scale and by clipped values."""
        bits = self.spec.dtype.bits
        low, high = self._low, self._high
        if self.spec.scheme is Scheme.SYMMETRIC:
            middle = middle_code(bits)
            of_low = of_high = by_scale + (middle - 1) * by_high - middle * by_low
        else:
            of_high = high * (by_scale / max_code(bits) + by_high)
            of_low = -low * (by_scale / max_code(bits) - by_low)
        for factor, gradient in ((self.low_factor, of_low), (self.high_factor, of_high)):
            factor -= rate * np.sign(gradient)
            np.clip(factor, *_FACTORS, out=factor)

    def _parameters(self) -> tuple[Floats, Floats]:
        low, high = self._low * self.low_factor, self._high * self.high_factor
        return parameters_of(low, high, self.spec)

    def _positions(self) -> Floats:
        """Return the codes before rounding, float32 [outputs, groups, inputs of a group]."""
        scales, offsets = (values[..., None] for values in self._grid)
        middle = middle_code(self.spec.dtype.bits)
        found: Floats = (self._grouped(self.weight) - offsets) / scales
        found += self._grouped(self.shift)
        found += middle
        return found

    def _grouped(self, values: Array) -> NDArray[np.float32]:
        grouped: NDArray[np.float32] = values.reshape(len(values), -1, self.spec.group_size or 1)
        return grouped


def learned_alone(
    weight: Floats, spec: QuantSpec, start: GroupedWeight, products: Floats, options: LearnOptions
) -> GroupedWeight:
    """Return a weight learned for its own results, from the mean products of its inputs.

    Each output keeps the best rounding seen.
    """
    learned, best = LearnedRounding(weight, spec, start), start
    least = np.full(len(weight), np.inf, np.float32)
    for step in range(options.steps + 1):
        found = learned.rounded()
        change = found.floats() - weight
        gradient = change @ products
        errors = np.einsum("ij,ij->i", gradient, change)
        better = (errors < least)[:, None]
        least = np.minimum(errors, least)
        best = GroupedWeight(
            np.where(better, found.codes, best.codes),
            np.where(better, found.scales, best.scales),
            np.where(better, found.offsets, best.offsets),
            found.bits,
            found.input_factors,
        )
        if step < options.steps:
            learned.descend(gradient, options.rate(step))
    return best
