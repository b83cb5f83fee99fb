"""Moments of inputs of layers, and corrections of weights from these moments."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.common.optional import GroupedWeights, LayerInputs
from neural_mp.adaptors.common.weights.grouped_weight import (
    Floats,
    GroupedWeight,
    GroupParameters,
    InputMoments,
)
from neural_mp.util.pytree import Array

M = TypeVar("M")

#: Rows of a triangle that are mirrored at a time, and columns that are summed.
_AT_ONCE = 128


@dataclass
class MomentSums:
    """Sums over the rows that a layer read.

    Attributes:
        products: sums of x xᵀ, in the lower triangle.
        magnitudes: sums of |x|.
    """

    products: Floats
    magnitudes: Floats
    rows: int = 0

    @classmethod
    def of_size(cls, inputs: int) -> MomentSums:
        """Return the sums of no rows."""
        return cls(np.zeros((inputs, inputs), np.float32), np.zeros(inputs, np.float32))

    def add_inputs(self, values: Array) -> None:
        """Add values whose last axis is that of the inputs.

        Rows with NaN or Inf, e.g. of padding that is masked later, are left out.
        """
        from scipy.linalg import blas  # the import takes a tenth of a second

        rows = np.ascontiguousarray(values, np.float32).reshape(-1, len(self.magnitudes))
        if not np.isfinite(rows.sum()):
            rows = rows[np.isfinite(rows).all(axis=1)]
        if not rows.size:
            return
        # One triangle, added in place: the product alone would be as large as the sums.
        blas.ssyrk(1.0, rows.T, beta=1.0, c=self.products.T, overwrite_c=1)
        for first in range(0, rows.shape[1], _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            self.magnitudes[part] += np.abs(rows[:, part]).sum(axis=0)
        self.rows += len(rows)

    def finish_moments(self) -> InputMoments:
        """Return the mean over the rows, in the memory of the sums; to be called once."""
        rows = np.float32(max(self.rows, 1))
        self.products /= rows
        size = len(self.products)
        for first in range(0, size, _AT_ONCE):
            part = slice(first, first + _AT_ONCE)
            corner = np.tril(self.products[part, part])
            self.products[part, part] = corner + np.tril(corner, -1).T
            self.products[part, part.stop :] = self.products[part.stop :, part].T
        self.magnitudes /= rows
        return InputMoments(self.products, self.magnitudes)


def build_weight_corrections(
    inputs: LayerInputs[M], with_weights: Callable[[M, Mapping[str, GroupedWeight]], M]
) -> GroupedWeights[M]:
    """Return the corrections of weights for kernels that read integer zero points.

    `with_weights` is as in `GroupedWeights`.
    """

    def measure_moments(
        model: M, batches: Iterable[Any], ops: Collection[str]
    ) -> dict[str, InputMoments]:
        layers = inputs.layers(model)
        sources = {op: layers[op].read for op in ops}
        tensors = {tensor for tensor in sources.values() if tensor is not None}
        sums: dict[str, MomentSums] = {}
        for tensor, values in inputs.values(model, batches, tensors):
            if tensor not in sums:
                sums[tensor] = MomentSums.of_size(values.shape[-1])
            sums[tensor].add_inputs(values)
        tensor_moments = {tensor: total.finish_moments() for tensor, total in sums.items()}
        return {
            op: tensor_moments[tensor] for op, tensor in sources.items() if tensor in tensor_moments
        }

    return GroupedWeights(
        lambda model: _Read({op: layer.weight for op, layer in inputs.layers(model).items()}),
        measure_moments,
        with_weights,
        GroupParameters.ZERO_POINTS,
    )


@dataclass(frozen=True)
class _Read(Mapping[str, Array]):
    """Weights that are read when accessed, so that only one is held."""

    readers: Mapping[str, Callable[[], Array]]

    def __getitem__(self, op: str) -> Array:
        return np.asarray(self.readers[op](), np.float32)

    def __iter__(self) -> Iterator[str]:
        return iter(self.readers)

    def __len__(self) -> int:
        return len(self.readers)
