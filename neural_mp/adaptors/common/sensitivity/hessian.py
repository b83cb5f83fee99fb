"""Sensitivity of weights to rounding, from second derivatives: HAWQ-V2 scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.common.framework import Framework
from neural_mp.adaptors.common.optional import require_part
from neural_mp.adaptors.common.quant_params import weight_limit_of
from neural_mp.adaptors.common.weights.cross_layer_scaling import Array, round_int8_weight
from neural_mp.space import TuningSpace

M = TypeVar("M")

#: Directions r at the outputs → op → squared norm of its gradient, |Jᵀr|².
Squares = Callable[[list[Array]], Mapping[str, float]]
#: Number of random directions at the outputs, averaged to estimate a trace.
DIRECTIONS = 8
_SIGNS = np.array([-1, 1], np.float32)


def estimate_weight_sensitivity(
    adaptor: Framework[M], model: M, batches: Iterable[Any], space: TuningSpace
) -> dict[str, float]:
    """Return op with an INT8 weight → sensitivity to rounding the weight.

    Dong et al., "HAWQ-V2: Hessian Aware trace-Weighted Quantization", 2020, equation 9: the mean of
    the Hessian's diagonal by the weight, times the squared distance of the weight from its
    rounding. The loss is half the squared distance of the outputs from their FP32 values, so no
    labels are needed; at its minimum, its Hessian is JᵀJ.

    Raises:
        ConversionError: the framework has no gradients.
    """
    if not adaptor.offers("hessian_traces"):
        adaptor.hessian_traces(model, batches, ())  # refuses before anything is computed
    layers = require_part(adaptor.corrections, adaptor.framework, "weights of layers").layer_params(
        model
    )
    ops = [op for op in space.tunable_ops if op in layers and op in space.int8_ops]
    sensitivity = {}
    for op, trace in adaptor.hessian_traces(model, batches, ops).items():
        matrix = layers[op].as_matrix().astype(np.float64)
        rounded = round_int8_weight(matrix, weight_limit_of(space, op))
        distance = float(np.square(matrix - rounded).sum())
        sensitivity[op] = trace / matrix.size * distance
    return sensitivity


def estimate_summed_traces(
    ops: Iterable[str], batches: Iterable[tuple[Sequence[Sequence[int]], Squares]]
) -> dict[str, float]:
    """Return op → trace of JᵀJ by its weight, summed over batches (Hutchinson's estimator).

    A batch is the shapes of its outputs and a function of directions at the outputs.
    """
    traces = dict.fromkeys(ops, 0.0)
    for shapes, squares in batches:
        for seed in range(DIRECTIONS if shapes else 0):
            random = np.random.default_rng(seed)
            signs = [random.choice(_SIGNS, tuple(shape)) for shape in shapes]
            for op, square in squares(signs).items():
                traces[op] += square / DIRECTIONS
    return traces
