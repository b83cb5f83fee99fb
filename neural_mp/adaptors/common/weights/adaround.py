"""Learned rounding and learned scales of INT8 weights, for the results of one layer.

The error of a layer's results is quadratic in its weight: with the rounded layers before, a layer
reads x̂ instead of x, and the mean of (Ŵx̂ - Wx)² is, per output, ŵHŵᵀ - 2ŵt + c with H = E[x̂x̂ᵀ] and
t = E[x̂ (wx)]. Both are sums over the calibration samples, so that no sample is kept.

`adaround` chooses for every weight between the two codes next to it by gradient descent on a
rectified sigmoid, with a penalty that lets it end at 0 or 1 (Nagel et al., "Up or Down? Adaptive
Rounding for Post-Training Quantization", 2020, equations 21 to 25). Wide layers, for which descent
takes minutes, choose column by column; the codes of all layers then settle, see `settle_codes`.
`learned_scale` clips weights to the range with the least error, and fits the scale to the codes by
least squares.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.quant_params import MIN_RANGE_WIDTH
from neural_mp.adaptors.common.weights.autoround import LearnOptions
from neural_mp.adaptors.common.weights.grouped_weight import Floats
from neural_mp.adaptors.common.weights.weight_corrections import InverseFactor, compensate_errors

#: Ends of the stretched sigmoid.
_GAMMA, _ZETA = -0.1, 1.1
#: Exponents of the penalty: from the first to the last, after a part of the steps without penalty.
_FIRST_EXPONENT, _LAST_EXPONENT, _FREE_STEPS = 20.0, 2.0, 0.2
#: Weight of the penalty per weight, relative to the error of rounding to nearest per output.
_PENALTY = 20.0
#: Size of a step of Adam (Kingma and Ba, 2015), and the decays of its means.
_RATE, _DECAYS = 0.05, (0.9, 0.999)
#: Fractions of the full range that are tried as range of a channel, then factors of the best one.
_SHRINKS = tuple(2 ** (-step / 2) for step in range(1, 13))
_REFINED = tuple(2 ** (step / 8) for step in (-2, -1, 1, 2))
#: Steps per step of the options: a step here takes a product of matrices, not a run of a block.
_STEPS_PER_STEP = 5
#: Operations of a step above which a layer is wide.
_WIDE = 1e8
#: Operations per cube of the inputs: factors of the products.
_PER_CUBE = 2.0
#: Relative error below which rounding to nearest is exact.
_EXACT = 1e-9
_TINY = 1e-30


@dataclass(frozen=True)
class LayerError:
    """The squared error of a layer's results, up to a constant, by its weight.

    Attributes:
        products: [groups, inputs, inputs], mean of x̂x̂ᵀ.
        targets: [groups, outputs, inputs], mean of (wx) x̂ᵀ.
        power: [groups, outputs], mean of (wx)².
    """

    products: Floats
    targets: Floats
    power: Floats

    def evaluate_weight(self, weight: Floats) -> Floats:
        """Return the mean squared error of every output, [groups, outputs]."""
        terms: Floats = weight @ self.products
        terms -= 2 * self.targets
        error = np.einsum("goi,goi->go", terms, weight) + self.power
        return np.maximum(error, _TINY).astype(np.float32)


@dataclass(frozen=True)
class RoundedLayer:
    """A rounded weight: codes · scales.

    Attributes:
        codes: float32 [groups, outputs, inputs], whole numbers.
        scales: float32 [groups, outputs, 1].
    """

    codes: Floats
    scales: Floats

    def to_floats(self) -> Floats:
        """Return the weight that the kernel multiplies by."""
        weight: Floats = self.codes * self.scales
        return weight


@dataclass(frozen=True)
class WeightGrid:
    """The grid of a weight.

    Attributes:
        limit: the largest code.
        per_channel: whether every output has a scale.
    """

    limit: int
    per_channel: bool = True

    def full_range_scales(self, weight: Floats) -> Floats:
        """Return the scales of the full range, [groups, outputs, 1]."""
        axes = 2 if self.per_channel else (0, 1, 2)
        largest = np.broadcast_to(np.abs(weight).max(axes, keepdims=True), (*weight.shape[:2], 1))
        return np.where(largest > MIN_RANGE_WIDTH, largest / self.limit, 1).astype(np.float32)

    def round_to_nearest(self, weight: Floats, scales: Floats) -> RoundedLayer:
        """Round to nearest."""
        codes = np.clip(np.rint(weight / scales), -self.limit, self.limit)
        return RoundedLayer(codes.astype(np.float32), scales)

    def pool_sums(self, values: Floats) -> Floats:
        """Return the sums [groups, outputs] that decide on a common scale."""
        if self.per_channel:
            return values
        return np.broadcast_to(values.sum(dtype=np.float32), values.shape)


def reconstruct_layer_weight(
    weight: Floats,
    grid: WeightGrid,
    error: LayerError,
    options: LearnOptions,
    *,
    rounding: bool,
    scales: bool,
) -> RoundedLayer:
    """Return a weight rounded for the results of its layer.

    No output has a larger error than rounded to nearest in the full range. `rounding` and `scales`
    state whether these are learned.
    """
    best = grid.round_to_nearest(weight, grid.full_range_scales(weight))
    for candidate in _iterate_candidate_roundings(weight, grid, error, options, rounding, scales):
        least = grid.pool_sums(error.evaluate_weight(best.to_floats()))
        better = (grid.pool_sums(error.evaluate_weight(candidate.to_floats())) < least)[..., None]
        best = RoundedLayer(
            np.where(better, candidate.codes, best.codes),
            np.where(better, candidate.scales, best.scales),
        )
    return best


def _iterate_candidate_roundings(
    weight: Floats,
    grid: WeightGrid,
    error: LayerError,
    options: LearnOptions,
    rounding: bool,
    scales: bool,
) -> Iterator[RoundedLayer]:
    chosen = grid.full_range_scales(weight)
    if scales:
        chosen = _search_scales(weight, grid, error)
        yield _fit_scales(grid.round_to_nearest(weight, chosen), grid, error)
    if rounding:
        learned = _learn_codes(weight, grid, chosen, error, options)
        yield learned
        if scales:
            yield _fit_scales(learned, grid, error)


def _search_scales(weight: Floats, grid: WeightGrid, error: LayerError) -> Floats:
    """Return the scales of the ranges with the least error, rounded to nearest."""
    full = grid.full_range_scales(weight)
    best, least = (
        full,
        grid.pool_sums(error.evaluate_weight(grid.round_to_nearest(weight, full).to_floats())),
    )
    for factors in (_SHRINKS, _REFINED):
        start = best
        for factor in factors:
            tried = np.minimum(start * np.float32(factor), full)
            errors = grid.pool_sums(
                error.evaluate_weight(grid.round_to_nearest(weight, tried).to_floats())
            )
            better = errors < least
            best, least = np.where(better[..., None], tried, best), np.where(better, errors, least)
    return best


def _fit_scales(rounded: RoundedLayer, grid: WeightGrid, error: LayerError) -> RoundedLayer:
    """Return the codes with the scales of least error.

    A kernel derives the scale from the largest weight, which must therefore keep the largest code.
    """
    codes = rounded.codes
    below = grid.pool_sums(np.einsum("goi,goi->go", codes @ error.products, codes))
    above = grid.pool_sums(np.einsum("goi,goi->go", codes, error.targets))
    largest = np.abs(codes).max(axis=2 if grid.per_channel else (0, 1, 2), keepdims=True)
    is_valid = (largest == grid.limit) & (below > 0)[..., None] & (above > 0)[..., None]
    fitted = (above / np.maximum(below, _TINY))[..., None]
    return RoundedLayer(codes, np.where(is_valid, fitted, rounded.scales).astype(np.float32))


def _learn_codes(
    weight: Floats, grid: WeightGrid, scales: Floats, error: LayerError, options: LearnOptions
) -> RoundedLayer:
    """Return a weight whose codes are each one of the two next to it."""
    position = np.clip(weight / scales, -grid.limit, grid.limit)
    low = np.floor(position)
    # The largest weight stays, so that kernels derive the same scale from it.
    is_free = (np.abs(position) < grid.limit) & (low < grid.limit)
    choice = CodeChoice(low, is_free.astype(np.float32), scales, error.products, error.targets)
    if _is_wide(weight):
        codes = compensate_codes(weight, choice)
    else:
        nearest = error.evaluate_weight(grid.round_to_nearest(weight, scales).to_floats())
        nearest = np.maximum(nearest, _EXACT * error.power + _TINY)
        codes = _descend_codes(position, choice, nearest[..., None], options)
    return RoundedLayer(settle_codes(codes, choice), scales)


def _descend_codes(
    position: Floats, choice: CodeChoice, nearest: Floats, options: LearnOptions
) -> Floats:
    low, is_free, scales = choice.low, choice.is_free, choice.scales
    up = (position - low) * is_free
    stretched = np.clip((up - _GAMMA) / (_ZETA - _GAMMA), 1e-6, 1 - 1e-6)
    value = np.log(stretched / (1 - stretched)).astype(np.float32)
    slope = (scales * is_free / nearest).astype(np.float32)
    mean, square = np.zeros_like(value), np.zeros_like(value)
    share = np.float32(_PENALTY / position.shape[-1])
    steps = _STEPS_PER_STEP * options.steps
    for step in range(steps):
        if options.limit.is_reached():
            break
        sigmoid = 1 / (1 + np.exp(-value))
        raw = sigmoid * (_ZETA - _GAMMA) + _GAMMA
        up = np.clip(raw, 0, 1)
        gradient = 2 * slope * choice.error_gradient(low + up * is_free)
        exponent = _penalty_exponent(step / steps)
        if exponent is not None:
            off = 2 * up - 1
            gradient -= (
                share * 2 * exponent * np.abs(off) ** (exponent - 1) * np.sign(off) * is_free
            )
        gradient *= (sigmoid * (1 - sigmoid) * (_ZETA - _GAMMA)) * ((raw > 0) & (raw < 1))
        mean += (1 - _DECAYS[0]) * (gradient - mean)
        square += (1 - _DECAYS[1]) * (gradient**2 - square)
        corrected = np.sqrt(square / (1 - _DECAYS[1] ** (step + 1)))
        rate = _RATE / (1 - _DECAYS[0] ** (step + 1))
        value -= rate * mean / (corrected + 1e-12)
    return (low + (value > 0) * is_free).astype(np.float32)


def _is_wide(weight: Floats) -> bool:
    return _operations_per_step(weight) > _WIDE


def count_rounding_operations(weight: Floats, options: LearnOptions) -> float:
    """Return the number of operations to learn rounding and scales of a weight."""
    steps = SWEEPS + len(_SHRINKS) + len(_REFINED)
    count = _operations_per_step(weight) * steps
    if _is_wide(weight):
        return count + _PER_CUBE * len(weight) * float(weight.shape[-1]) ** 3
    return count + _operations_per_step(weight) * _STEPS_PER_STEP * options.steps


def _operations_per_step(weight: Floats) -> float:
    return 2.0 * weight.size * weight.shape[-1]


def _penalty_exponent(passed: float) -> float | None:
    """Return the exponent of the penalty after a part of the steps; None without a penalty."""
    if passed < _FREE_STEPS:
        return None
    remaining = (1 - passed) / (1 - _FREE_STEPS)
    return _LAST_EXPONENT + (_FIRST_EXPONENT - _LAST_EXPONENT) * remaining


#: Columns whose changes are applied to the others in one product of matrices.
_BLOCK = 64
#: Maximum number of sweeps; after some ten, hardly a code changes.
SWEEPS = 20
#: Relative fall of the error below which a code stays, against rounding errors of the gradient.
_LEAST_FALL = 1e-4


@dataclass(frozen=True)
class CodeChoice:
    """The two codes of every weight, and the error that they are chosen for.

    Attributes:
        low: float32 [groups, outputs, inputs], the lower code.
        is_free: whether the weight may also take the next code.
        scales: float32 [groups, outputs, 1].
        products, targets: see `LayerError`.
    """

    low: Floats
    is_free: Floats
    scales: Floats
    products: Floats
    targets: Floats

    def error_gradient(self, codes: Floats) -> Floats:
        """Return half of the gradient of the error by the weight."""
        result: Floats = ((codes * self.scales) @ self.products).astype(np.float32, copy=False)
        result -= self.targets
        return result


def compensate_codes(weight: Floats, choice: CodeChoice) -> Floats:
    """Return codes whose errors the columns that are rounded later compensate for."""
    codes = np.empty_like(weight)
    for group, products in enumerate(choice.products):
        try:
            factor = InverseFactor.from_products(products)
        except np.linalg.LinAlgError:  # sums that are rounding errors mostly
            high = choice.low[group] + choice.is_free[group]
            steps = np.rint(weight[group] / choice.scales[group])
            codes[group] = np.clip(steps, choice.low[group], high)
            continue
        order, upper = factor.order, factor.upper
        lost = choice.targets[group] - weight[group] @ products
        change = ((lost[:, order] @ upper.T) @ upper).T
        columns = np.ascontiguousarray(weight[group].T[order]) + change
        low, free = (array[group].T[order] for array in (choice.low, choice.is_free))
        group_codes = _round_columns(columns, low, low + free, choice.scales[group, :, 0], factor)
        codes[group, :, order] = group_codes
    return codes


def _round_columns(
    columns: Floats, low: Floats, high: Floats, scales: Floats, factor: InverseFactor
) -> Floats:
    """Return the codes [inputs, outputs] of columns, in order; the columns are overwritten."""
    codes = np.empty_like(columns)

    def round_column(index: int, column: Floats) -> Floats:
        codes[index] = np.clip(np.rint(column / scales), low[index], high[index])
        return codes[index] * scales

    compensate_errors(columns, factor, _BLOCK, round_column)
    return codes


def settle_codes(codes: Floats, choice: CodeChoice) -> Floats:
    """Return codes none of which can change alone without more error, as far as sweeps suffice."""
    codes, gradient = codes.copy(), choice.error_gradient(codes)
    for _ in range(SWEEPS):
        blocks = range(0, codes.shape[2], _BLOCK)
        if not sum(_sweep_block(codes, gradient, choice, first) for first in blocks):
            break
    return codes


def _sweep_block(codes: Floats, gradient: Floats, choice: CodeChoice, first: int) -> bool:
    """Change codes of a block of columns and the gradient; return whether a code has changed."""
    last = min(first + _BLOCK, codes.shape[2])
    products, scales = choice.products, choice.scales[..., 0]
    inner = gradient[:, :, first:last].copy()
    changes = np.zeros_like(inner)
    power = np.einsum("gii->gi", products)
    for index in range(first, last):
        code, low = codes[:, :, index], choice.low[:, :, index]
        step = np.where(code == low, np.float32(1), np.float32(-1)) * choice.is_free[:, :, index]
        change = step * scales
        own = change**2 * power[:, None, index]
        falls = 2 * change * inner[:, :, index - first] + own < -_LEAST_FALL * own
        if falls.any():
            codes[:, :, index] += step * falls
            change *= falls
            changes[:, :, index - first] = change
            inner += change[:, :, None] * products[:, None, index, first:last]
    has_changed = bool(changes.any())
    if has_changed:
        gradient += changes @ products[:, first:last]
    return has_changed
