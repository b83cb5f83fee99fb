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

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import StoredLayer, needed
from neural_mp.adaptors.common.sensitivity.fisher import specs_of
from neural_mp.adaptors.common.weights.corrected_weights import CorrectedWeights
from neural_mp.adaptors.common.weights.grouped_weight import Floats, input_group, rounded_inputs
from neural_mp.core.enums import KernelInputs
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import TuningSpace
from neural_mp.util.pytree import Array

M = TypeVar("M")
#: Rows of an input sampled from one part of a batch, and in total.
_ROWS_PER_PART, _ROWS = 32, 512
_TINY = 1e-30


def layer_noise(
    adaptor: Framework[M],
    model: M,
    batches: Iterable[Any],
    space: TuningSpace,
    corrected: CorrectedWeights[M] | None = None,
) -> dict[str, dict[str, float]]:
    """Return op → text of the quantization of its weight → relative noise of its results.

    Covers the ops whose weight can be stored in integers while their inputs stay float; without
    those whose inputs calibration does not reach. `corrected` are the corrected weights of the
    model.

    Raises:
        ConversionError: the framework does not return the inputs of layers.
    """
    offered = needed(adaptor.layer_inputs, adaptor.framework, "inputs of layers")
    layers = {op: layer for op, layer in offered.layers(model).items() if specs_of(space, op)}
    specs = {op: specs_of(space, op) for op in layers}
    corrected = corrected or CorrectedWeights(adaptor, model)
    corrected.of({op: [s for s in op_specs if s.corrections] for op, op_specs in specs.items()})
    tensors = {layer.read for layer in layers.values() if layer.read is not None}
    rows = _sample_rows(offered.values(model, batches, tensors)) if tensors else {}
    return {
        op: dict(_score_specs(op, layer, rows.get(layer.read or ""), specs[op], corrected))
        for op, layer in layers.items()
        if layer.read is None or layer.read in rows
    }


def _sample_rows(values: Iterable[tuple[str, Array]]) -> dict[str, Floats]:
    """Return tensor → evenly spread rows [rows, inputs] of its values."""
    parts: dict[str, list[Floats]] = {}
    counts: dict[str, int] = {}
    for name, array in values:
        rows = array.reshape(-1, array.shape[-1]) if array.ndim else array.reshape(1, 1)
        count = min(_ROWS_PER_PART, _ROWS - counts.get(name, 0), len(rows))
        if count > 0:
            indices = np.linspace(0, len(rows) - 1, count).astype(np.int64)
            # A copy: arrays of a run may be overwritten by the next.
            parts.setdefault(name, []).append(np.array(rows[indices], np.float32))
            counts[name] = counts.get(name, 0) + count
        elif min(counts.values(), default=_ROWS) >= _ROWS:
            break
    return {name: np.concatenate(rows) for name, rows in parts.items()}


def _score_specs(
    op: str,
    layer: StoredLayer,
    rows: Floats | None,
    specs: Iterable[QuantSpec],
    corrected: CorrectedWeights[Any],
) -> Iterator[tuple[str, float]]:
    """Yield the text of each quantization and its noise; without rows, that of the weight."""
    weight = np.asarray(layer.weight(), np.float32)
    truth = weight if rows is None else rows @ weight.T
    signal = max(float(np.vdot(truth, truth)), _TINY)
    for spec in specs:
        if rows is None:
            output = corrected.rounded(op, weight, spec)
        else:
            output = _kernel_output(rows, op, weight, spec, corrected)
        error = output - truth
        yield str(spec), float(np.vdot(error, error)) / signal


def _kernel_output(
    rows: Floats, op: str, weight: Floats, spec: QuantSpec, corrected: CorrectedWeights[Any]
) -> Floats:
    if spec.inputs is not KernelInputs.INT8:
        return rows @ corrected.rounded(op, weight, spec).T
    size = input_group(spec, weight.shape[1])
    if spec.group_size is None:
        return rounded_inputs(rows, size) @ corrected.rounded(op, weight, spec).T
    stored = corrected.grouped(op, weight, spec)
    scaled = rows if stored.input_factors is None else rows * stored.input_factors
    return rounded_inputs(scaled, size) @ stored.stored().T
