"""Converted models whose weights use more of int8 than saturating products leave right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from neural_mp.adaptors.tensorflow.integer_kernels import (
    FULL,
    S8,
    ZERO_POINT,
    quantize_weight,
    real_sums,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import Array, NodeDef, TensorGraph, make_constant
from neural_mp.core.byte_products import (
    EXACT_EVERYWHERE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    KernelKind,
)
from neural_mp.errors import ConversionError

_LIMIT = WEIGHT_LIMITS[REDUCED_RANGE]
_DEPTHWISE = "_FusedQuantizedDepthwiseConv2D"
_KERNELS = ("_FusedQuantizedConv2D", _DEPTHWISE, "_QuantizedMatMul")


def wide_kernels(model: TensorFlowModel) -> frozenset[KernelKind]:
    """The kinds of the integer kernels that have a weight beyond ±63."""
    return frozenset(_kind(node, weight) for node, weight in _wide_nodes(model.graph))


def with_reduced_weights(model: TensorFlowModel) -> TensorFlowModel:
    """The model with weights rounded once more, to ±63, where a kernel may saturate.

    Raises:
        ConversionError: a kernel does not say how its input is stored, as those that were not
            written by this package, or by an earlier version of it.
    """
    graph = model.graph.copy()
    for node, weight in list(_wide_nodes(graph)):
        if _kind(node, weight) in EXACT_EVERYWHERE:
            continue
        if ZERO_POINT not in node.attr:
            raise ConversionError(
                f"the kernel {node.name!r} does not say how its input is stored, so its weight "
                f"cannot be rounded anew"
            )
        _reduce(graph, node, weight)
    return replace(model, graph=graph)


def _reduce(graph: TensorGraph, node: NodeDef, weight: Array) -> None:
    depthwise = node.op == _DEPTHWISE
    low, high = _weight_limits(node)
    limits = _constant(graph, node, high)
    shaped = limits.reshape(weight.shape[2:]) if depthwise else limits
    rounded = quantize_weight(weight * (shaped / np.float32(FULL)), depthwise, _LIMIT)
    # What the zero point of the input adds to a product was taken out of the bias, by the weights.
    offset = node.attr[ZERO_POINT].i * float(_constant(graph, node, _input_limits(node)[1])) / 255
    lost = offset * (real_sums(weight, limits, depthwise) - rounded.sums)
    bias = _constant(graph, node, 2).astype(np.float64) + lost
    edited = graph.edit(node.name)
    for position, value, kind in (
        (1, rounded.integers, S8),
        (2, bias.astype(np.float32), None),
        (low, -rounded.limits, None),
        (high, rounded.limits, None),
    ):
        name = graph.unused(f"{node.input[position].split(':')[0]}/reduced")
        edited.input[position] = graph.add(make_constant(name, value, kind))


def _device_inputs(node: NodeDef) -> int:
    return len(node.attr["Tdevice_inputs"].list.type)


def _input_limits(node: NodeDef) -> tuple[int, int]:
    """The positions of the input's least and greatest number among the inputs of a kernel."""
    first = _device_inputs(node)
    return first, first + 1


def _weight_limits(node: NodeDef) -> tuple[int, int]:
    first = _device_inputs(node)
    return first + 2, first + 3


def _constant(graph: TensorGraph, node: NodeDef, position: int) -> Array:
    value = graph.constant(node.input[position])
    if value is None:
        raise ConversionError(f"input {position} of the kernel {node.name!r} is no constant")
    return value


def _wide_nodes(graph: TensorGraph) -> Iterator[tuple[NodeDef, Array]]:
    for node in graph.nodes.values():
        if node.op in _KERNELS:
            weight = graph.constant(node.input[1])
            if weight is not None:
                integers = np.asarray(weight).astype(np.int8)
                if (np.abs(integers.astype(np.int16)) > _LIMIT).any():
                    yield node, integers


def _kind(node: NodeDef, weight: Array) -> KernelKind:
    if node.op == "_QuantizedMatMul":
        return KernelKind.DENSE
    single = node.op == _DEPTHWISE and weight.shape[3] == 1
    return KernelKind.DEPTHWISE if single else KernelKind.CONVOLUTION
