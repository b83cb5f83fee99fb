"""Corrections of weights in groups: AWQ, GPTQ, HQQ, and learned rounding of one layer.

For inputs with the mean products H = E[x xᵀ], the mean squared error of a layer's result is
tr(Δ H Δᵀ), Δ the change of its weight. Every output row is rounded in several ways and keeps the
way with the least error, so that no row is worse than rounded to nearest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.weights.autoround import (
    DEFAULT_LEARNING,
    LearnedRounding,
    LearnOptions,
    learn_weight_alone,
)
from neural_mp.adaptors.common.weights.grouped_weight import (
    VALUES_AT_ONCE,
    Codes,
    Floats,
    GroupedWeight,
    InputMoments,
    Quantizer,
    in_groups,
    iterate_row_parts,
    join_row_parts,
    max_code,
    middle_code,
    to_bfloat16,
)
from neural_mp.core.enums import WeightCorrection
from neural_mp.util.pytree import Array
from neural_mp.util.system.memory import FREED, MAX_RESULTS

#: Fraction of every input's power that is added to the diagonal of H, against noise.
_DAMPING = 0.01
#: Columns that GPTQ rounds between two updates of all later columns.
_BLOCK = 128
#: Fractions of a group's range that are tried, in order: the last ones for 2 and 3 bits only.
_SHRINKS = tuple(1 - step / 20 for step in range(13))
_SHRINKS_OF_4_BITS = 7
#: Exponents of the inputs' magnitudes that AWQ tries, and the rows that the choice is made on.
_EXPONENTS = tuple(step / 12 for step in range(13))
_ROWS_TRIED = 256
#: Norm of the error that HQQ minimizes, steps, and the penalty with its growth per step.
_HQQ_NORM, _HQQ_STEPS, _HQQ_PENALTY, _HQQ_GROWTH = 0.7, 20, 10.0, 1.01
_LEAST = 1e-8


def round_with_corrections(
    weight: Array,
    quantizer: Quantizer,
    moments: InputMoments | None = None,
    factors: Floats | None = None,
    options: LearnOptions = DEFAULT_LEARNING,
) -> GroupedWeight:
    """Round a weight [outputs, inputs] with the corrections of the quantizer's `spec`.

    Those that need data require the `moments` of the inputs. `factors` of the inputs replace those
    that suit this weight alone.
    """
    weight = weight.astype(np.float32, copy=False)
    FREED.note_freed_bytes(MAX_RESULTS * weight.nbytes)
    corrections = quantizer.spec.corrections
    if WeightCorrection.HQQ in corrections:
        rows = (weight[part] for part in iterate_row_parts(weight.shape))
        return join_row_parts(_optimize_half_quadratic(block, quantizer) for block in rows)
    if not corrections or moments is None:
        return quantizer.round_to_nearest(weight)
    if quantizer.spec.is_learned:
        start = round_with_corrections(weight, quantizer.without_learning, moments, factors)
        learned = LearnedRounding(weight, quantizer, start)
        return learn_weight_alone(weight, learned, moments.products, options)
    factor = factorize_for_gptq(quantizer, moments)
    if factors is not None:
        return _round_weight(weight, quantizer, moments, factor, factors)
    if WeightCorrection.AWQ in corrections:
        factors = search_awq_factors([weight], quantizer, moments, factor)
    scaled = _round_weight(weight, quantizer, moments, factor, factors)
    plain = quantizer.round_to_nearest(weight)
    better = _sum_row_errors(weight, plain, moments) < _sum_row_errors(weight, scaled, moments)
    return plain if better else scaled


def compute_row_errors(weight: Array, rounded: GroupedWeight, moments: InputMoments) -> Floats:
    """Return the mean squared error of each output."""
    errors = []
    for part in iterate_row_parts(weight.shape):
        change = rounded.take_rows(part).to_floats()
        change -= weight[part]
        errors.append(np.einsum("ij,ij->i", change @ moments.products, change))
    return np.concatenate(errors)


def _sum_row_errors(weight: Array, rounded: GroupedWeight, moments: InputMoments) -> float:
    return float(compute_row_errors(weight, rounded, moments).sum())


@dataclass(frozen=True)
class InverseFactor:
    """Factor of the inverse of H, the mean products of inputs, for GPTQ.

    Attributes:
        order: the inputs in the order of rounding, those with the largest power first.
        upper: float32 [inputs, inputs], U with UᵀU = H⁻¹, in that order.
        divisors: float32 [inputs], of the columns of `upper`, in that order; None for 1.
    """

    order: NDArray[np.intp]
    upper: Floats
    divisors: Floats | None = None

    @classmethod
    def from_products(cls, products: Floats) -> InverseFactor:
        """Factorize the mean products [inputs, inputs]."""
        from scipy.linalg import lapack  # the import takes a tenth of a second

        power = np.diagonal(products).astype(np.float64)
        # The damping is relative to each input's own power, so that outliers leave others alone.
        power[power <= 0] = 1.0
        size = np.sqrt(power).astype(np.float32)
        order = np.argsort(-power, kind="stable")
        # One array throughout: it is the largest of all in wide layers. With the inputs in reverse,
        # a factor of H itself is inverted, and float32 is exact enough beside the damping.
        last = order[::-1]
        matrix = products[np.ix_(last, last)].T
        matrix /= size[last]
        matrix /= size[last, None]
        np.fill_diagonal(matrix, 1 + _DAMPING)
        matrix, failed = lapack.spotrf(matrix, overwrite_a=1)
        if failed:
            raise np.linalg.LinAlgError("the moments of inputs are not positive definite")
        matrix, _ = lapack.strtri(matrix, overwrite_c=1)
        upper = _reverse_matrix(matrix.T)
        upper /= size[order]
        return cls(order, upper)

    def scale_inputs(self, factors: Floats | None) -> InverseFactor:
        """Return the factor for inputs multiplied by `factors`; no second matrix is made."""
        return self if factors is None else replace(self, divisors=factors[self.order])

    @property
    def diagonal(self) -> Floats:
        """The diagonal of U, for scaled inputs."""
        result: Floats = np.diagonal(self.upper)
        return result if self.divisors is None else result / self.divisors

    def get_rows(self, first: int, last: int) -> Floats:
        """Return some rows of U for scaled inputs, from the column `first` on."""
        result = self.upper[first:last, first:]
        return result if self.divisors is None else result / self.divisors[first:]


def _reverse_matrix(matrix: Floats) -> Floats:
    """Reverse the rows and the columns of a matrix in place."""
    flat = np.ascontiguousarray(matrix).reshape(-1)
    half = len(flat) // 2
    for first in range(0, half, VALUES_AT_ONCE):
        part = flat[first : min(first + VALUES_AT_ONCE, half)]
        mirror = flat[len(flat) - first - len(part) : len(flat) - first]
        part[:], mirror[:] = mirror[::-1].copy(), part[::-1].copy()
    return flat.reshape(matrix.shape)


def factorize_for_gptq(quantizer: Quantizer, moments: InputMoments) -> InverseFactor | None:
    """Return the factor of the moments for a quantizer with GPTQ; None without."""
    gptq = WeightCorrection.GPTQ in quantizer.spec.corrections
    return InverseFactor.from_products(moments.products) if gptq else None


def search_awq_factors(
    weights: Sequence[Array],
    quantizer: Quantizer,
    moments: InputMoments,
    factor: InverseFactor | None,
) -> Floats | None:
    """Return the factors of inputs that reduce the error of all readers most; None for no factors.

    Factors are a power of the inputs' mean magnitude (Lin et al., "AWQ", 2023, equation 5), and
    tried on some rows with the rounding that follows. Errors of several readers are relative to
    their errors without factors. `factor` is the `factorize_for_gptq`.
    """
    readers = [w[:: -(-len(w) // _ROWS_TRIED)].astype(np.float32) for w in weights]
    size = np.maximum(moments.magnitudes, moments.magnitudes.max() * 1e-5 + _LEAST)
    best: Floats | None = None
    baseline, least = np.ones(len(readers)), np.inf
    for exponent in _EXPONENTS:
        scale = size**exponent
        factors = to_bfloat16(np.sqrt(scale.max() * scale.min()) / scale)
        errors = np.array(
            [
                _sum_row_errors(w, _round_weight(w, quantizer, moments, factor, factors), moments)
                for w in readers
            ]
        )
        if not exponent:
            baseline = np.maximum(errors, _LEAST * max(errors.max(), _LEAST))
        error = float((errors / baseline).sum())
        if error < least:
            best, least = factors if exponent else None, error
    return best


def _round_weight(
    weight: Floats,
    quantizer: Quantizer,
    moments: InputMoments,
    factor: InverseFactor | None,
    factors: Floats | None,
) -> GroupedWeight:
    """Round a weight for inputs multiplied by `factors`, some rows at a time."""
    scaled = None if factor is None else factor.scale_inputs(factors)
    return join_row_parts(
        _round_rows(weight[part], quantizer, moments, scaled, factors)
        for part in iterate_row_parts(weight.shape)
    )


def _round_rows(
    weight: Floats,
    quantizer: Quantizer,
    moments: InputMoments,
    factor: InverseFactor | None,
    factors: Floats | None,
) -> GroupedWeight:
    """Round rows of a weight, each in the best of several ways."""
    FREED.note_freed_bytes(MAX_RESULTS * weight.nbytes)
    scaled = weight if factors is None else weight / factors
    candidates = _iterate_candidate_roundings(scaled, quantizer, moments, factor, factors)
    best = next(candidates)
    least = compute_row_errors(weight, best, moments)
    for candidate in candidates:
        FREED.note_freed_bytes(MAX_RESULTS * weight.nbytes)
        errors = compute_row_errors(weight, candidate, moments)
        better = errors < least
        least = np.where(better, errors, least)
        best = best.with_outputs(better, candidate)
    return best


def _iterate_candidate_roundings(
    scaled: Floats,
    quantizer: Quantizer,
    moments: InputMoments,
    factor: InverseFactor | None,
    factors: Floats | None,
) -> Iterator[GroupedWeight]:
    """Yield a weight rounded to nearest, then compensated, with full and with chosen ranges."""
    power = np.diagonal(moments.products)
    power = power if factors is None else power * factors**2
    full = quantizer.fit_grid(scaled)
    yield quantizer.round_on_grid(scaled, *full, factors)
    if factor is None:
        clipped = _search_ranges(scaled, quantizer, power)
        yield quantizer.round_on_grid(scaled, *clipped, factors)
        return
    # An error that later inputs compensate for counts less: by the square of U's diagonal.
    remaining = np.empty_like(power)
    remaining[factor.order] = 1 / factor.diagonal**2
    for grid in (full, _search_ranges(scaled, quantizer, remaining)):
        codes = _round_compensated_codes(scaled, quantizer, grid, factor)
        yield quantizer.make_weight(codes, *grid, factors)


def _search_ranges(weight: Floats, quantizer: Quantizer, power: Floats) -> tuple[Floats, Floats]:
    """Return the scales and offsets of every group with the least error of inputs with a power."""
    grouped = in_groups(weight, quantizer.group_size)
    low, high = grouped.min(axis=2), grouped.max(axis=2)
    weights = in_groups(power[None], quantizer.group_size)
    scales = offsets = least = np.zeros(0, np.float32)
    count = _SHRINKS_OF_4_BITS if quantizer.bits >= 4 else len(_SHRINKS)
    for shrink in _SHRINKS[:count]:
        tried = quantizer.grid_of(low * shrink, high * shrink)
        change = quantizer.round_on_grid(weight, *tried).stored_floats()
        change -= weight
        change *= change
        grouped = in_groups(change, quantizer.group_size)
        grouped *= weights
        errors = grouped.sum(axis=2)
        if shrink == _SHRINKS[0]:
            (scales, offsets), least = tried, errors
            continue
        better = errors < least
        least = np.where(better, errors, least)
        scales = np.where(better, tried[0], scales)
        offsets = np.where(better, tried[1], offsets)
    return scales, offsets


def _round_compensated_codes(
    weight: Floats, quantizer: Quantizer, grid: tuple[Floats, Floats], factor: InverseFactor
) -> Codes:
    """Return the codes of a weight whose rounding errors later columns compensate for."""
    outputs, inputs = weight.shape
    order = factor.order
    columns = np.ascontiguousarray(weight.T[order])
    scales, offsets = (np.ascontiguousarray(values.T) for values in grid)
    group = order // quantizer.group_size
    middle, most = middle_code(quantizer.bits), max_code(quantizer.bits)
    codes = np.empty((inputs, outputs), np.uint8)

    def round_column(index: int, column: Floats) -> Floats:
        scale, offset = scales[group[index]], offsets[group[index]]
        code = np.rint((column - offset) / scale) + middle
        np.clip(code, 0, most, out=code)
        codes[order[index]] = code
        value: Floats = (code - middle) * scale + offset
        return value

    compensate_errors(columns, factor, _BLOCK, round_column)
    return np.ascontiguousarray(codes.T)


def compensate_errors(
    columns: Floats, factor: InverseFactor, block: int, rounded: Callable[[int, Floats], Floats]
) -> None:
    """Round columns in order, and let those that follow make up for the errors.

    Frantar et al., "GPTQ", 2022, algorithm 1. `columns` are the weight [inputs, outputs] in the
    order of rounding, which is overwritten; all later columns are updated after every `block` of
    them. `rounded` returns the column at a place as rounded.
    """
    for first in range(0, len(columns), block):
        last = min(first + block, len(columns))
        upper = factor.get_rows(first, last)
        errors = np.empty((last - first, columns.shape[1]), np.float32)
        for index in range(first, last):
            row = upper[index - first, index - first :]
            error = columns[index] - rounded(index, columns[index])
            error /= row[0]
            columns[index + 1 : last] -= row[1 : last - index, None] * error
            errors[index - first] = error
        columns[last:] -= upper[:, last - first :].T @ errors


def _optimize_half_quadratic(weight: Floats, quantizer: Quantizer) -> GroupedWeight:
    """Return a weight with the offsets that suit a norm of the error below 1.

    Badri and Shaji, "Half-Quadratic Quantization of Large Machine Learning Models", 2023.
    """
    scales, offsets = quantizer.fit_grid(weight)
    grouped = in_groups(weight, quantizer.group_size)
    best, least = offsets, np.full(scales.shape, np.inf)
    penalty = _HQQ_PENALTY
    for _ in range(_HQQ_STEPS):
        codes = quantizer.find_nearest_codes(grouped, scales[..., None], offsets[..., None])
        steps = (codes.astype(np.float32) - middle_code(quantizer.bits)) * scales[..., None]
        change = grouped - (steps + offsets[..., None])
        size = np.abs(change)
        errors = (size**_HQQ_NORM).sum(axis=2)
        best = np.where(errors < least, offsets, best)
        least = np.minimum(errors, least)
        threshold = np.maximum(size, _LEAST) ** (_HQQ_NORM - 1) / penalty
        residual = np.sign(change) * np.maximum(size - threshold, 0)
        offsets = quantizer.free_offsets((grouped - residual - steps).mean(axis=2), scales)
        penalty *= _HQQ_GROWTH
    return quantizer.round_on_grid(weight, scales, best)
