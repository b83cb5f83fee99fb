"""Weights and biases of layers: rescaling per channel, and Hessian traces."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.sensitivity import Squares, estimate_summed_traces
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale, Window
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, Role, get_op_properties, get_op_role
from neural_mp.adaptors.tensorflow.graph.runtime import Runner
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    Consumers,
    NodeDef,
    TensorGraph,
    get_integers_attribute,
    get_node_name,
    get_text_attribute,
    indexed_name,
    is_control,
    list_data_inputs,
    plain_name,
    read_constant_shape,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.errors import ConversionError

_SUMS = (np.add, np.subtract)


@dataclass(frozen=True)
class _Norm:
    """A normalization over the last axis as a group of ops.

    Attributes:
        result: sum with the result.
        gamma: product of the inverse deviation and the constant scale.
        shifts: additions of a constant shift.
    """

    result: str
    gamma: str
    shifts: tuple[str, ...]


def collect_layer_params(model: TensorFlowModel) -> dict[str, LayerParams]:
    """Return op → its parameters."""
    graph = model.graph
    params = {name: _read_layer_params(model, name) for name in model.structure.fusion_groups}
    for name, norm in _find_norms(model).items():
        _, scale = _read_constant_vector(graph, norm.gamma)
        params[name] = LayerParams(name, lambda scale=scale: scale.reshape(-1), pooled=True)  # type: ignore[misc]
    return params


def channel_preserving_ops(model: TensorFlowModel) -> frozenset[str]:
    """Return the Reshapes that keep the last axis."""
    ops = set()
    for name, node in model.graph.nodes.items():
        if get_op_role(node) is not Role.RESHAPE or name not in model.structure.agnostic_ops:
            continue
        source, result = model.shapes[node.input[0]], model.shapes[name]
        if source and result and source[-1] is not None and source[-1] == result[-1]:
            ops.add(name)
    return frozenset(ops)


def _read_layer_params(model: TensorFlowModel, name: str) -> LayerParams:
    graph, node = model.graph, model.graph.nodes[name]

    def read_weight() -> Array:
        value = graph.constant_value(node.input[1])
        # The output channels of a depthwise convolution span two axes, as groups of one channel.
        return value.reshape(*value.shape[:2], 1, -1) if depthwise else value

    kernel = LAYERS[node.op]
    depthwise = kernel.is_depthwise
    bias = model.structure.fusion_groups[name].bias
    result = bias.ops[-1] if bias else name
    if kernel.is_dense:
        across = node.attr["transpose_b"].b
        axes = (0, 1) if across else (1, 0)
        return LayerParams(result, read_weight, *axes, pooled=True, shifts=bias is not None)
    groups = read_constant_shape(graph[node.input[1]])[2] if depthwise else 1
    window = _read_convolution_window(node)
    return LayerParams(
        result, read_weight, 3, 2, groups, pooled=True, window=window, shifts=bias is not None
    )


def _read_convolution_window(node: NodeDef) -> Window:
    """Return the window of a convolution with channels last."""
    strides = tuple(get_integers_attribute(node, "strides")[1:3])
    dilations = tuple((get_integers_attribute(node, "dilations") or [1] * 4)[1:3])
    padding = get_text_attribute(node, "padding")
    if padding == "SAME":
        return Window(strides, dilations, None)
    pads = get_integers_attribute(node, "explicit_paddings") if padding == "EXPLICIT" else [0] * 8
    return Window(strides, dilations, ((pads[2], pads[3]), (pads[4], pads[5])))


def _find_vector_position(graph: TensorGraph, node: NodeDef) -> int | None:
    """Return the position of the only constant input if it is a vector along the last axis."""
    constants = [
        position
        for position, tensor in enumerate(node.input)
        if graph.is_constant(tensor) and not is_control(tensor)
    ]
    if len(constants) != 1:
        return None
    sizes = read_constant_shape(graph[node.input[constants[0]]])
    return constants[0] if sizes and set(sizes[:-1]) <= {1} else None


def _read_constant_vector(graph: TensorGraph, name: str) -> tuple[int, Array]:
    node = graph.nodes[name]
    position = _find_vector_position(graph, node)
    assert position is not None
    return position, graph.constant_value(node.input[position])


def _find_norms(model: TensorFlowModel) -> dict[str, _Norm]:
    """Return sum with the result of a normalization → the normalization."""
    graph = model.graph
    consumers = graph.find_consumers()
    norms = (
        _match_norm(graph, consumers, name, model.output_nodes)
        for name, node in graph.nodes.items()
        if get_op_properties(node).formula is np.multiply
        and any(graph[t].op == "Rsqrt" for t in list_data_inputs(node))
        and _find_vector_position(graph, node) is not None
    )
    return {norm.result: norm for norm in norms if norm is not None}


def _match_norm(
    graph: TensorGraph, consumers: Consumers, gamma: str, outputs: frozenset[str]
) -> _Norm | None:
    """Follow x · γ/σ and -μ · γ/σ to their sum, with constants added on the way.

    Return None if another op reads any intermediate result.
    """
    terms = {reader for reader, _ in consumers[gamma]}
    exclusive = len(terms) == len(consumers[gamma]) and gamma not in outputs
    if (
        not terms
        or not exclusive
        or any(get_op_properties(graph.nodes[term]).formula is not np.multiply for term in terms)
    ):
        return None
    shifts: list[str] = []
    while len(terms) > 1 or not shifts:
        readers = {reader for term in terms for reader, _ in consumers[term]}
        ready = sorted(r for r in readers if _is_sum_of_terms(graph, r, terms))
        if not ready:
            break
        parts = [get_node_name(tensor) for tensor in list_data_inputs(graph.nodes[ready[0]])]
        summed = terms.intersection(parts)
        if any(len(consumers[part]) != 1 or part in outputs for part in summed):
            break
        if len(summed) < len(parts):
            shifts.append(ready[0])
        terms = (terms - summed) | {ready[0]}
    return _Norm(terms.pop(), gamma, tuple(shifts)) if len(terms) == 1 else None


def _is_sum_of_terms(graph: TensorGraph, name: str, terms: set[str]) -> bool:
    """Whether an addition has only terms, or a term and a constant vector, as operands."""
    node = graph.nodes[name]
    parts = [get_node_name(tensor) for tensor in list_data_inputs(node)]
    return (
        get_op_properties(node).formula in _SUMS
        and any(part in terms for part in parts)
        and all(part in terms or _find_vector_position(graph, node) is not None for part in parts)
    )


def with_layer_params(
    model: TensorFlowModel, changes: Mapping[str, LayerRescale]
) -> TensorFlowModel:
    """Return the model with rescaled parameters in some layers."""
    graph, layers, norms = model.graph.copy_graph(), collect_layer_params(model), _find_norms(model)
    for name, change in changes.items():
        layer, weight = layers[name], change.rescale_weight(layers[name])
        if name in norms:
            position, value = _read_constant_vector(graph, norms[name].gamma)
            _replace_constant(
                graph, norms[name].gamma, position, weight.reshape(value.shape), "scale"
            )
            shifts = norms[name].shifts
        else:
            shape = read_constant_shape(graph[graph.nodes[name].input[1]])
            _replace_constant(graph, name, 1, weight.reshape(shape), "weight")
            shifts = (layer.result,) if layer.result != name else ()
        for shift in shifts:
            position, value = _read_constant_vector(graph, shift)
            changed = change.rescale_bias(value.reshape(-1), value.size)
            _replace_constant(graph, shift, position, changed.reshape(value.shape), "bias")
    return model.with_graph(graph)


def _replace_constant(
    graph: TensorGraph, name: str, position: int, value: Array, stem: str
) -> None:
    graph.edit_node(name).input[position] = graph.put_constant(f"{name}/corrected_{stem}", value)


def estimate_hessian_traces(
    model: TensorFlowModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, float]:
    """Return op → trace of the Hessian with respect to its weight.

    Raises:
        ConversionError: an op of the model has no gradient.
    """
    graph, constants = model.without_weights()
    outputs = [
        tensor
        for port in model.signature.outputs
        if (tensor := graph.get_tensor_by_name(indexed_name(port.tensor))).dtype.is_floating
    ]
    weights = {op: plain_name(model.graph.nodes[op].input[1]) for op in ops}
    with graph.as_default():
        signs = [tf.compat.v1.placeholder(tensor.dtype) for tensor in outputs]
        tensors = [graph.get_tensor_by_name(indexed_name(name)) for name in weights.values()]
        try:
            gradients = tf.compat.v1.gradients(outputs, tensors, signs)
        except LookupError as error:
            raise ConversionError(f"an op of the model has no gradient: {error}") from error
        squares = {
            op: tf.reduce_sum(tf.square(gradient)).name
            for op, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
        }
    runner = Runner(graph, constants)

    def make_output_function(inputs: object) -> tuple[list[tuple[int, ...]], Squares]:
        feeds = model.signature.bind_inputs(inputs)

        def compute_squared_gradients(directions: list[Array]) -> dict[str, float]:
            directed = zip(signs, directions, strict=True)
            arguments = {**feeds, **{placeholder.name: value for placeholder, value in directed}}
            return dict(
                zip(squares, map(float, runner(arguments, list(squares.values()))), strict=True)
            )

        results = runner(feeds, [tensor.name for tensor in outputs])
        return [np.shape(value) for value in results], compute_squared_gradients

    return estimate_summed_traces(weights, map(make_output_function, batches))
