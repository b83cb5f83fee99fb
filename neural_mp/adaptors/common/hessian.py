"""How much rounding a weight harms, by second derivatives: the scores of HAWQ-V2."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import numpy as np

from neural_mp.adaptors.common.adaptor_protocol import Framework
from neural_mp.adaptors.common.cross_layer_scaling import Array, rounded_weight
from neural_mp.adaptors.common.optional import needed
from neural_mp.adaptors.common.quant_params import weight_limit_of
from neural_mp.space import TuningSpace

M = TypeVar("M")

#: Directions at the outputs r → op and the squared length of its gradient, |Jᵀr|².
Squares = Callable[[list[Array]], Mapping[str, float]]
#: Random directions at the outputs, of which the mean estimates a trace.
DIRECTIONS = 8
_SIGNS = np.array([-1, 1], np.float32)


def weight_sensitivity(
    adaptor: Framework[M], model: M, batches: Iterable[Any], space: TuningSpace
) -> dict[str, float]:
    """Op with an INT8 weight → harm of rounding it.

    Dong et al., "HAWQ-V2: Hessian Aware trace-Weighted Quantization", 2020, equation 9: the mean
    of the diagonal of the Hessian by the weight, times the squared distance of the weight from its
    rounded self. The loss is half the squared distance of the outputs from what they are, so that
    no labels are needed; at its minimum its Hessian is JᵀJ.

    Raises:
        ConversionError: the framework has no gradients.
    """
    without = "gradients, which hawq_v2 needs; choose another strategy"
    hessian = needed(adaptor.hessian, adaptor.framework, without)
    layers = needed(adaptor.corrections, adaptor.framework, "weights of layers").layers(model)
    wanted = [op for op in space.tunable_ops if op in layers and op in space.int8_ops]
    found = {}
    for op, trace in hessian.hessian_traces(model, batches, wanted).items():
        matrix = layers[op].matrix().astype(np.float64)
        rounded = rounded_weight(matrix, weight_limit_of(space, op))
        distance = float(np.square(matrix - rounded).sum())
        found[op] = trace / matrix.size * distance
    return found


def summed_traces(
    ops: Iterable[str], batches: Iterable[tuple[Sequence[Sequence[int]], Squares]]
) -> dict[str, float]:
    """Op → trace of JᵀJ by its weight, the sum over batches (Hutchinson's estimator).

    Args:
        ops: the ops.
        batches: of every batch the shapes of the outputs, and a function of directions at the
            outputs.
    """
    traces = dict.fromkeys(ops, 0.0)
    for shapes, squares in batches:
        for draw in range(DIRECTIONS if shapes else 0):
            random = np.random.default_rng(draw)
            signs = [random.choice(_SIGNS, tuple(shape)) for shape in shapes]
            for op, square in squares(signs).items():
                traces[op] += square / DIRECTIONS
    return traces
