"""Constants of layers: for rescaling by channel, and with what they read, for noise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from neural_mp.adaptors.common.optional import StoredLayer
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale
from neural_mp.adaptors.common.weights.layer_windows import Window
from neural_mp.adaptors.openvino.fusion import GraphStructure, has_weight, structure
from neural_mp.adaptors.openvino.graph_edit import (
    array_of,
    give_name,
    is_constant,
    is_float,
    name_of,
    rank_of,
    readers_of,
    redirect_inputs,
    tensor_of,
    weight_of,
)
from neural_mp.adaptors.openvino.integer_weights import is_table, matrix_of
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, has_role, row_of
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.util.pytree import Array


def layer_params(model: OpenVinoModel) -> dict[str, LayerParams]:
    """Return op → its constants."""
    return _params_by_layer(model.structure)


def _params_by_layer(graph: GraphStructure) -> dict[str, LayerParams]:
    layers = {name: _build_layer_params(graph, name, node) for name, node in graph.nodes.items()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def _build_layer_params(graph: GraphStructure, name: str, node: Any) -> LayerParams | None:
    axes = rank_of(node.output(0)) or 0
    if _scales_channels(node):
        addition = _following_addition(graph, name)
        result = name if addition is None else name_of(addition)
        return LayerParams(result, lambda: _constant_operand(node).reshape(-1))
    group = graph.fusion_groups.get(name)
    if group is None or not has_weight(node):
        return None
    result = name if group.bias is None else group.bias.ops[-1]
    weight = partial(_weight_array, node)
    if has_role(node, Role.PRODUCT):
        transposed = bool(node.get_attributes()["transpose_b"])
        if node.get_attributes()["transpose_a"] or rank_of(weight_of(node)) != 2:
            return None
        outputs, inputs = (0, 1) if transposed else (1, 0)
        return LayerParams(result, weight, outputs, inputs)
    groups = int(weight_of(node).get_shape()[0]) if row_of(node).is_grouped else 1
    return LayerParams(
        result, weight, 0, 1, groups, 1 - axes, pooled=True, window=_conv_window(node)
    )


def _conv_window(node: Any) -> Window:
    attributes = node.get_attributes()
    strides, dilations = tuple(attributes["strides"]), tuple(attributes["dilations"])
    if str(attributes["auto_pad"]) in ("same_upper", "same_lower"):
        return Window(strides, dilations, None, odd_before=attributes["auto_pad"] == "same_lower")
    pads = tuple(zip(attributes["pads_begin"], attributes["pads_end"], strict=True))
    return Window(strides, dilations, pads)


def _scales_channels(node: Any) -> bool:
    """Whether an op multiplies the last axis by a constant, as the scales of norms do."""
    if not has_role(node, Role.SCALING):
        return False
    arrays = map(array_of, node.input_values())
    constants = [array for array in arrays if array is not None]
    if len(constants) != 1 or rank_of(node.output(0)) is None or not is_float(node.output(0)):
        return False
    (scales,) = constants
    return bool(scales.ndim and scales.size == scales.shape[-1] > 1)


def _following_addition(graph: GraphStructure, name: str) -> Any | None:
    """Return the op that adds a constant to an op's only read result; None if there is none."""
    readers = readers_of(graph.nodes[name].output(0))
    node = readers[0] if len(readers) == 1 else None
    if node is None or not has_role(node, Role.SUM) or name_of(node) not in graph.nodes:
        return None
    return node if any(map(is_constant, node.input_values())) else None


def _constant_operand(node: Any) -> Array:
    return np.asarray(array_of(node.input_value(_constant_position(node))), np.float32)


def _constant_position(node: Any) -> int:
    return next(i for i in range(node.get_input_size()) if is_constant(node.input_value(i)))


def _weight_array(node: Any) -> Array:
    """Return the weight of a layer; [groups · outputs, inputs, …] for grouped convolutions."""
    array = np.asarray(array_of(weight_of(node)), np.float32)
    return array.reshape(-1, *array.shape[2:]) if row_of(node).is_grouped else array


def with_layer_params(model: OpenVinoModel, changes: Mapping[str, LayerRescale]) -> OpenVinoModel:
    """Return the model with changed constants in some layers."""
    program = model.program.clone()
    graph = structure(program, model.rejected)
    layers = _params_by_layer(graph)
    for name, change in changes.items():
        _rescale_layer(graph, name, layers[name], change)
    program.validate_nodes_and_infer_types()
    return replace(model, program=program, given=None, _runners={})


def _rescale_layer(
    graph: GraphStructure, name: str, layer: LayerParams, change: LayerRescale
) -> None:
    node = graph.nodes[name]
    index = _constant_position(node) if _scales_channels(node) else row_of(node).weight
    shape = list(node.input_value(index).get_shape())
    weight = change.weight(layer)
    _replace_constant(node, index, weight.reshape(shape), f"{name}/corrected/weight")
    channels = weight.shape[layer.outputs]
    if layer.result == name:
        if change.shift is not None:
            _add_bias(node, change.bias(None, channels))
        return
    addition = graph.nodes[layer.result]
    bias = change.bias(np.broadcast_to(_constant_operand(addition).reshape(-1), channels), channels)
    position = _constant_position(addition)
    _replace_constant(addition, position, _reshape_bias(bias, node), f"{name}/corrected/bias")


def _reshape_bias(bias: Array, node: Any) -> Array:
    shape = [1] * (rank_of(node.output(0)) or 1)
    shape[row_of(node).channels] = -1
    return np.asarray(bias.reshape(shape), np.float32)


def _replace_constant(node: Any, position: int, values: Array, name: str) -> None:
    constant = give_name(name, ops.constant(np.ascontiguousarray(values, np.float32)))
    redirect_inputs([node.input(position)], constant)


def _add_bias(node: Any, bias: Array) -> None:
    readers = list(node.output(0).get_target_inputs())
    added = ops.add(node, ops.constant(_reshape_bias(bias, node)))
    redirect_inputs(readers, give_name(f"{name_of(node)}/corrected/bias", added))


def stored_layers(model: OpenVinoModel) -> dict[str, StoredLayer]:
    """Return op → its weight and the tensor that it reads."""
    structure = model.structure
    return {
        name: StoredLayer(
            partial(matrix_of, node), None if is_table(node) else tensor_of(node.input_value(0))
        )
        for name, node in structure.nodes.items()
        if is_table(node) or (name in structure.fusion_groups and has_role(node, Role.PRODUCT))
    }
