"""Rounding of weights by columns: a compensated start, and descent by single codes.

Every weight has two codes, `low` and, if it is free, the next one. The error of a layer is
quadratic in its weight, so that the change by one code is known from the gradient; a sweep over all
columns takes as many operations as one gradient. `compensated` rounds column by column, and the
columns that follow make up for the errors (Frantar et al., "GPTQ", 2022); `settled` changes codes
one by one for as long as the error falls.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.weights.grouped_weight import Floats
from neural_mp.adaptors.common.weights.weight_corrections import InverseFactor, compensate

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

    def gradient(self, codes: Floats) -> Floats:
        """Return half of the gradient of the error by the weight."""
        result: Floats = ((codes * self.scales) @ self.products).astype(np.float32, copy=False)
        result -= self.targets
        return result


def compensated(weight: Floats, choice: CodeChoice) -> Floats:
    """Return codes whose errors the columns that are rounded later compensate for."""
    codes = np.empty_like(weight)
    for group, products in enumerate(choice.products):
        try:
            factor = InverseFactor.of(products)
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
        group_codes = _by_columns(columns, low, low + free, choice.scales[group, :, 0], factor)
        codes[group, :, order] = group_codes
    return codes


def _by_columns(
    columns: Floats, low: Floats, high: Floats, scales: Floats, factor: InverseFactor
) -> Floats:
    """Return the codes [inputs, outputs] of columns, in order; the columns are overwritten."""
    codes = np.empty_like(columns)

    def rounded(index: int, column: Floats) -> Floats:
        codes[index] = np.clip(np.rint(column / scales), low[index], high[index])
        return codes[index] * scales

    compensate(columns, factor, _BLOCK, rounded)
    return codes


def settled(codes: Floats, choice: CodeChoice) -> Floats:
    """Return codes none of which can change alone without more error, as far as sweeps suffice."""
    codes, gradient = codes.copy(), choice.gradient(codes)
    for _ in range(SWEEPS):
        blocks = range(0, codes.shape[2], _BLOCK)
        if not sum(_sweep(codes, gradient, choice, first) for first in blocks):
            break
    return codes


def _sweep(codes: Floats, gradient: Floats, choice: CodeChoice, first: int) -> bool:
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
