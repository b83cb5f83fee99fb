"""Moments of what a layer reads and returns, with exact and with rounded layers before it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.weights.adaround import Floats, LayerError, RoundedLayer
from neural_mp.core.observations import ChannelRange, Range
from neural_mp.util.pytree import Array

#: Fraction of every input's power that is added to the moments, against noise.
_DAMPING = 0.01


@dataclass
class MomentsOfRows:
    """Sums over the rows that a layer read, exact and rounded.

    All are taken around the means of the first rows: of inputs that hardly vary, the squares alone
    would leave nothing but rounding errors.
    """

    products: Floats
    targets: Floats
    power: Floats
    inputs: Floats
    results: Floats
    rows: int = 0
    #: Means of the first rows: of inputs [groups, inputs] and of results [groups, outputs].
    origins: tuple[Floats, Floats] | None = None

    @classmethod
    def of(cls, weight: Floats) -> MomentsOfRows:
        """Return the sums of no rows."""
        groups, outputs, inputs = weight.shape
        return cls(
            np.zeros((groups, inputs, inputs), np.float32),
            np.zeros((groups, outputs, inputs), np.float32),
            np.zeros((groups, outputs), np.float32),
            np.zeros((groups, inputs), np.float32),
            np.zeros((groups, outputs), np.float32),
        )

    def add(self, weight: Floats, exact: Floats, actual: Floats) -> None:
        """Add rows [groups, rows, inputs]."""
        if not exact.shape[1]:
            return
        results = exact @ weight.swapaxes(1, 2)
        if self.origins is None:
            self.origins = actual.mean(axis=1), results.mean(axis=1)
        actual, results = (
            rows - origin[:, None]
            for rows, origin in zip((actual, results), self.origins, strict=True)
        )
        self.products += actual.swapaxes(1, 2) @ actual
        self.targets += results.swapaxes(1, 2) @ actual
        self.power += np.einsum("gro,gro->go", results, results)
        self.inputs += actual.sum(axis=1)
        self.results += results.sum(axis=1)
        self.rows += exact.shape[1]

    def error(self, centered: bool) -> LayerError:
        """Return the mean squared error of the rows; `centered` without that of the means."""
        rows = np.float32(self.rows)
        inputs, results = self.inputs / rows, self.results / rows
        result = LayerError(
            self.products / rows - inputs[:, :, None] * inputs[:, None],
            self.targets / rows - results[:, :, None] * inputs[:, None],
            self.power / rows - results**2,
        )
        if centered:
            return result
        inputs, results = self._means()
        return LayerError(
            result.products + inputs[:, :, None] * inputs[:, None],
            result.targets + results[:, :, None] * inputs[:, None],
            result.power + results**2,
        )

    def _means(self) -> tuple[Floats, Floats]:
        """Return the means of inputs and results."""
        assert self.origins is not None
        rows, (inputs, results) = np.float32(self.rows), self.origins
        return inputs + self.inputs / rows, results + self.results / rows

    def lost_mean(self, weight: Floats) -> Floats:
        """Return the mean error of the results, [groups, outputs]."""
        inputs, results = self._means()
        result: Floats = results - np.einsum("goi,gi->go", weight, inputs)
        return result


def damped(error: LayerError, weight: Floats) -> LayerError:
    """Return the error plus a small one for every weight that changes."""
    extra = _DAMPING * np.einsum("gii->gi", error.products)
    diagonal = np.arange(extra.shape[1])
    products = error.products.copy()
    products[:, diagonal, diagonal] += extra
    return LayerError(
        products,
        error.targets + weight * extra[:, None],
        error.power + (weight**2 * extra[:, None]).sum(axis=2),
    )


def relative_error(error: LayerError, rounded: RoundedLayer) -> float:
    """Return the squared error of a layer's results relative to their squares."""
    total = float(error.power.sum())
    return float(error.of(rounded.floats()).sum()) / total if total > 0 else 0.0


def rounded_input(values: Array, span: Range, axis: int) -> Array:
    """Return an input as an integer kernel rounds it, given its range and its channel axis."""
    if isinstance(span, ChannelRange) and len(span.channels) == values.shape[axis]:
        params = [QuantParams.of(param) for param in span.channels]
        shape = [-1 if index == axis % values.ndim else 1 for index in range(values.ndim)]
        scale = np.array([param.scale for param in params], np.float32).reshape(shape)
        zero = np.array([param.zero_point for param in params], np.float32).reshape(shape)
    else:
        whole = QuantParams.of(span)
        scale, zero = np.asarray(whole.scale, np.float32), np.asarray(whole.zero_point, np.float32)
    codes = np.clip(np.rint(values / scale) + zero, 0, 255)
    return np.asarray((codes - zero) * scale, np.float32)
