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

from neural_mp.adaptors.common.weights.grouped_weight import (
    Floats,
    GroupedWeight,
    Quantizer,
    in_groups,
    max_code,
    middle_code,
)
from neural_mp.core.enums import Scheme
from neural_mp.core.quant_spec import ROUNDING_STEPS
from neural_mp.util.pytree import Array
from neural_mp.util.system.watched_thread import TimeLimit

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
        limit: ends learning at a step; the best rounding so far counts.
    """

    steps: int = ROUNDING_STEPS
    seed: int = 0
    limit: TimeLimit = field(default_factory=TimeLimit, compare=False, repr=False)

    def step_size(self, step: int) -> float:
        """Return the size of a step; all steps together move a shift by half a step at most."""
        return (1 - step / self.steps) / self.steps


DEFAULT_LEARNING = LearnOptions()


@dataclass
class LearnedRounding:
    """A weight whose rounding is learned.

    Arrays per weight are [outputs, groups, inputs of a group], the last group filled up.

    Attributes:
        weight: float32 [outputs, inputs], of which `start` is a rounding.
        start: the rounding that descent starts from; its factors of inputs stay.
        shift: added before rounding, in steps.
        low_factor, high_factor: float32 [outputs, groups], fractions of the ends of each range.
    """

    weight: Floats
    quantizer: Quantizer
    start: GroupedWeight
    shift: Floats = field(init=False)
    low_factor: Floats = field(init=False)
    high_factor: Floats = field(init=False)

    def __post_init__(self) -> None:
        factors = self.start.input_factors
        scaled = self.weight if factors is None else self.weight / factors
        self._scaled = self._group_values(scaled)
        bits, scales = self.quantizer.bits, self.start.scales
        self._is_symmetric = self.quantizer.spec.scheme is Scheme.SYMMETRIC
        lowest = middle_code(bits) - self._is_symmetric
        self._low = self.start.offsets - np.float32(lowest) * scales
        self._high = self.start.offsets + (max_code(bits) - middle_code(bits)) * scales
        self.shift = np.zeros_like(self._scaled)
        self.low_factor, self.high_factor = np.ones_like(scales), np.ones_like(scales)
        self._grid = scales, self.start.offsets
        # A code that is not the nearest one stays: the shift leads past the threshold.
        codes = self._group_values(self.start.codes.astype(np.float32))
        positions = np.clip(self._compute_unrounded_codes(), 0, max_code(bits))
        away = np.sign(codes - np.rint(positions))
        shifted = codes - np.float32(_PAST_THRESHOLD) * away - positions
        self.shift = np.where(away == 0, np.float32(0), shifted)

    def round_weight(self) -> GroupedWeight:
        """Return the weight as rounded now."""
        codes = np.clip(np.rint(self._compute_unrounded_codes()), 0, max_code(self.quantizer.bits))
        flat = codes.astype(np.uint8).reshape(len(codes), -1)[:, : self.weight.shape[1]]
        factors = self.start.input_factors
        return self.quantizer.make_weight(np.ascontiguousarray(flat), *self._grid, factors)

    def descend_gradient(self, gradient: Array, rate: float) -> None:
        """Take a step against the gradient of an error by the rounded weight."""
        if self.start.input_factors is not None:
            gradient = gradient * self.start.input_factors
        most = max_code(self.quantizer.bits)
        along, positions = self._group_values(gradient), self._compute_unrounded_codes()
        codes = np.rint(positions)
        above, below = codes > most, codes < 0
        inside = np.where(above | below, np.float32(0), along)
        # Where nothing is clipped, the change by the scale is that of the rounding error.
        error = np.clip(codes, 0, most) - (positions - self.shift)
        by_scale = np.einsum("ogi,ogi->og", inside, error)
        self._update_ranges(
            by_scale, (along * above).sum(axis=2), (along * below).sum(axis=2), rate
        )
        np.sign(inside, out=inside)
        inside *= np.float32(rate)
        self.shift -= inside
        self._grid = self.quantizer.grid_of(
            self._low * self.low_factor, self._high * self.high_factor
        )

    def _update_ranges(
        self, by_scale: Floats, by_high: Floats, by_low: Floats, rate: float
    ) -> None:
        """Move the ends of the ranges, given the gradients by scale and by clipped values."""
        bits = self.quantizer.bits
        if self._is_symmetric:
            middle = middle_code(bits)
            of_low = of_high = by_scale + (middle - 1) * by_high - middle * by_low
        else:
            of_high = self._high * (by_scale / max_code(bits) + by_high)
            of_low = -self._low * (by_scale / max_code(bits) - by_low)
        for factor, gradient in ((self.low_factor, of_low), (self.high_factor, of_high)):
            factor -= np.float32(rate) * np.sign(gradient)
            np.clip(factor, *_FACTORS, out=factor)

    def _compute_unrounded_codes(self) -> Floats:
        scales, offsets = (values[..., None] for values in self._grid)
        positions: Floats = (self._scaled - offsets) / scales
        positions += self.shift
        positions += middle_code(self.quantizer.bits)
        return positions

    def _group_values(self, values: Array) -> Floats:
        return np.asarray(in_groups(values, self.quantizer.group_size), np.float32)


def learn_weight_alone(
    weight: Floats, learned: LearnedRounding, products: Floats, options: LearnOptions
) -> GroupedWeight:
    """Return a weight learned for its own results, from the mean products of its inputs.

    Each output keeps the best rounding seen.
    """
    best = learned.start
    least = np.full(len(weight), np.inf, np.float32)
    for step in range(options.steps + 1):
        candidate = learned.round_weight()
        change = candidate.to_floats() - weight
        gradient = change @ products
        errors = np.einsum("ij,ij->i", gradient, change)
        best = best.with_outputs(errors < least, candidate)
        least = np.minimum(errors, least)
        if options.limit.is_reached():
            break
        if step < options.steps:
            learned.descend_gradient(gradient, options.step_size(step))
    return best
