"""Noise of stored weights without gradients, from the inputs that layers see in calibration.

The noise of a layer is the squared error of its results relative to their square: of a weight W
with the rounding error Δ, tr(ΔHΔᵀ) / tr(WHWᵀ), where H is the second moment of its inputs, the
Hessian of the squared error by a row of W (Frantar and Alistarh, "Optimal Brain Compression",
2022). Both are computed on sampled inputs; a kernel that rounds its inputs to INT8 adds that error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.adaptor_protocol import Framework
from neural_mp.adaptors.common.fisher import rounded, specs_of
from neural_mp.adaptors.common.integer_groups import round_in_groups, rounded_inputs
from neural_mp.adaptors.common.optional import StoredLayer, needed
from neural_mp.core.enums import KernelInputs
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array

M = TypeVar("M")
#: Rows of an input sampled from one part of a batch, and in total.
_ROWS_PER_PART, _ROWS = 32, 512
_TINY = 1e-30


def layer_noise(
    adaptor: Framework[M], model: M, batches: Iterable[Any], space: TuningSpace
) -> dict[str, dict[str, float]]:
    """Return op → text of the quantization of its weight → relative noise of its results.

    Covers the ops whose weight can be stored in integers while their inputs stay float; without
    those whose inputs calibration does not reach.

    Raises:
        ConversionError: the framework does not return the inputs of layers.
    """
    offered = needed(adaptor.layer_inputs, adaptor.framework, "inputs of layers")
    layers = {op: layer for op, layer in offered.layers(model).items() if specs_of(space, op)}
    read = {layer.read for layer in layers.values() if layer.read is not None}
    rows = _sampled(offered.values(model, batches, read)) if read else {}
    return {
        op: dict(_scores(layer, rows.get(layer.read or ""), specs_of(space, op)))
        for op, layer in layers.items()
        if layer.read is None or layer.read in rows
    }


def _sampled(values: Iterable[tuple[str, Array]]) -> dict[str, NDArray[np.float32]]:
    """Return tensor → evenly spread rows [rows, inputs] of its values."""
    parts: dict[str, list[NDArray[np.float32]]] = {}
    counts: dict[str, int] = {}
    for name, array in values:
        found = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
        left = min(_ROWS_PER_PART, _ROWS - counts.get(name, 0), len(found))
        if left > 0:
            places = np.linspace(0, len(found) - 1, left).astype(np.int64)
            # A copy: arrays of a run may be overwritten by the next.
            parts.setdefault(name, []).append(np.array(found[places], np.float32))
            counts[name] = counts.get(name, 0) + left
        elif min(counts.values(), default=_ROWS) >= _ROWS:
            break
    return {name: np.concatenate(found) for name, found in parts.items()}


def _scores(
    layer: StoredLayer, rows: NDArray[np.float32] | None, specs: Iterable[QuantSpec]
) -> Iterator[tuple[str, float]]:
    """Yield the text of each quantization and its noise; without rows, that of the weight."""
    weight = np.asarray(layer.weight(), np.float32)
    truth = weight if rows is None else rows @ weight.T
    signal = max(float(np.vdot(truth, truth)), _TINY)
    for spec in specs:
        found = _restored(weight, spec)
        if rows is not None:
            found = _as_read(rows, spec) @ found.T
        error = found - truth
        yield str(spec), float(np.vdot(error, error)) / signal


def _restored(weight: NDArray[np.float32], spec: QuantSpec) -> NDArray[np.float32]:
    if spec.group_size is None:
        return rounded(weight, spec)
    return round_in_groups(weight, spec).floats()


def _as_read(rows: NDArray[np.float32], spec: QuantSpec) -> NDArray[np.float32]:
    is_rounded = spec.inputs is KernelInputs.INT8 and spec.group_size is not None
    return rounded_inputs(rows, spec.group_size or 1) if is_rounded else rows
