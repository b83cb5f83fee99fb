"""Reduced range of weights in converted models, for exact results of saturating accumulation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neural_mp.adaptors.common.quant_params import IntegerWeight, saturating, wide_kinds
from neural_mp.adaptors.tensorflow.integer_kernels import (
    FULL,
    S8,
    ZERO_POINT,
    quantize_weight,
    real_sums,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.ops import INTEGER_KERNELS
from neural_mp.adaptors.tensorflow.tensor_graph import Array, NodeDef, TensorGraph, make_constant
from neural_mp.core.int8_accumulation import REDUCED_RANGE, WEIGHT_LIMITS, KernelKind
from neural_mp.errors import ConversionError

_LIMIT = WEIGHT_LIMITS[REDUCED_RANGE]


def full_range_kernels(model: TensorFlowModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with weights beyond ±63."""
    return wide_kinds(_weights(model.graph))


def with_reduced_weights(model: TensorFlowModel) -> TensorFlowModel:
    """Return the model with weights rounded again, to ±63, for kernels that may saturate.

    Raises:
        ConversionError: a kernel does not record its input's zero point, as kernels from other
            programs or earlier versions.
    """
    graph = model.graph.copy()
    for name in saturating(_weights(graph)):
        node = graph.nodes[name]
        if ZERO_POINT not in node.attr:
            raise ConversionError(
                f"the kernel {name!r} does not record the zero point of its input, so its weight "
                f"cannot be rounded again; convert the original model again"
            )
        _reduce(graph, node)
    return replace(model, graph=graph)


def _reduce(graph: TensorGraph, node: NodeDef) -> None:
    depthwise = INTEGER_KERNELS[node.op] is KernelKind.DEPTHWISE
    weight = _constant(graph, node, 1).astype(np.int8)
    first = len(node.attr["Tdevice_inputs"].list.type)  # limits of input, then weight
    input_limit = float(_constant(graph, node, first + 1))
    limits = _constant(graph, node, first + 3)
    shaped = limits.reshape(weight.shape[2:]) if depthwise else limits
    rounded = quantize_weight(weight * (shaped / np.float32(FULL)), depthwise, _LIMIT)
    # The offset by the input's zero point was subtracted from the bias, based on the old weights.
    offset = node.attr[ZERO_POINT].i * input_limit / 255
    lost = offset * (real_sums(weight, limits, depthwise) - rounded.sums)
    bias = _constant(graph, node, 2).astype(np.float64) + lost
    edited = graph.edit(node.name)
    for position, value, kind in (
        (1, rounded.integers, S8),
        (2, bias.astype(np.float32), None),
        (first + 2, -rounded.limits, None),
        (first + 3, rounded.limits, None),
    ):
        name = graph.unused(f"{node.input[position].split(':')[0]}/reduced")
        edited.input[position] = graph.add(make_constant(name, value, kind))


def _constant(graph: TensorGraph, node: NodeDef, position: int) -> Array:
    value = graph.constant(node.input[position])
    if value is None:
        raise ConversionError(f"input {position} of the kernel {node.name!r} must be constant")
    return value


def _weights(graph: TensorGraph) -> Iterator[IntegerWeight[str]]:
    """Yield the weights of integer kernels, by node name."""
    for name, node in graph.nodes.items():
        weight = graph.constant(node.input[1]) if node.op in INTEGER_KERNELS else None
        if weight is not None:
            integers = np.asarray(weight).astype(np.int8)
            yield IntegerWeight(name, _kind(node, integers), integers)


def _kind(node: NodeDef, weight: Array) -> KernelKind:
    kind = INTEGER_KERNELS[node.op]
    multiplies = kind is KernelKind.DEPTHWISE and weight.shape[3] > 1
    return KernelKind.CONVOLUTION if multiplies else kind
