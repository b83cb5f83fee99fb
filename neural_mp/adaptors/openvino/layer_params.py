"""Constants of layers, for rescaling by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from neural_mp.adaptors.common.cross_layer_scaling import LayerParams, LayerRescale
from neural_mp.adaptors.openvino.fusion import GraphStructure, has_weight, structure
from neural_mp.adaptors.openvino.graph_edit import array_of, name_of, rank_of, source_of, type_of
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.util.pytree import Array


def layers(model: OpenVinoModel) -> dict[str, LayerParams]:
    """Return op → its constants."""
    return _layers(model.structure)


def _layers(found: GraphStructure) -> dict[str, LayerParams]:
    made = {name: _layer(found, name, node) for name, node in found.nodes.items()}
    return {name: layer for name, layer in made.items() if layer is not None}


def _layer(found: GraphStructure, name: str, node: Any) -> LayerParams | None:
    group = found.fusion_groups.get(name)
    if group is None or not has_weight(node):
        return None
    result = group.tail if group.bias is not None and len(group.steps) == 1 else name
    if group.bias is not None:
        result = group.bias.ops[-1]
    weight, axes = partial(_weight, node), rank_of(node.output(0)) or 0
    if type_of(node) == "MatMul":
        transposed = bool(node.get_attributes()["transpose_b"])
        if node.get_attributes()["transpose_a"] or rank_of(source_of(node, 1)) != 2:
            return None
        outputs, inputs = (0, 1) if transposed else (1, 0)
        return LayerParams(result, weight, outputs, inputs)
    groups = 1
    if type_of(node) == "GroupConvolution":
        groups = int(source_of(node, 1).get_shape()[0])
    return LayerParams(result, weight, 0, 1, groups, axis=1 - axes, pooled=True)


def _weight(node: Any) -> Array:
    """Return the weight of a layer; [groups · outputs, inputs, …] for grouped convolutions."""
    array = np.asarray(array_of(source_of(node, 1)), np.float32)
    if type_of(node) == "GroupConvolution":
        return array.reshape(-1, *array.shape[2:])
    return array


def with_layers(model: OpenVinoModel, changes: Mapping[str, LayerRescale]) -> OpenVinoModel:
    """Return the model with changed constants in some layers."""
    program = model.program.clone()
    found = structure(program)
    known = _layers(found)
    for name, change in changes.items():
        _change(found, name, known[name], change)
    program.validate_nodes_and_infer_types()
    return replace(model, program=program, given=None, _runners={})


def _change(found: GraphStructure, name: str, layer: LayerParams, change: LayerRescale) -> None:
    node = found.nodes[name]
    shape = list(source_of(node, 1).get_shape())
    weight = change.weight(layer)
    _put(node, 1, weight.reshape(shape), f"{name}/corrected/weight")
    step = found.fusion_groups[name].bias
    channels = weight.shape[layer.outputs]
    if step is None:
        if change.shift is not None:
            _add_bias(node, layer, change.bias(None, channels))
        return
    addition = found.nodes[step.ops[0]]
    position = next(i for i in range(2) if array_of(source_of(addition, i)) is not None)
    before = np.asarray(array_of(source_of(addition, position)), np.float32)
    bias = change.bias(np.broadcast_to(before.reshape(-1), channels), channels)
    _put(addition, position, _by_channel(bias, layer, node), f"{name}/corrected/bias")


def _by_channel(bias: Array, layer: LayerParams, node: Any) -> Array:
    """Return a bias in the shape that an addition to the layer's result needs."""
    axes = rank_of(node.output(0)) or 1
    if type_of(node) == "MatMul":
        return np.asarray(bias.reshape([1] * (axes - 1) + [-1]), np.float32)
    return np.asarray(bias.reshape([1, -1] + [1] * (axes - 2)), np.float32)


def _put(node: Any, position: int, values: Array, name: str) -> None:
    constant = ops.constant(np.ascontiguousarray(values, np.float32))
    constant.set_friendly_name(name)
    node.input(position).replace_source_output(constant.output(0))


def _add_bias(node: Any, layer: LayerParams, bias: Array) -> None:
    readers = list(node.output(0).get_target_inputs())
    constant = ops.constant(_by_channel(bias, layer, node))
    added = ops.add(node, constant)
    added.set_friendly_name(f"{name_of(node)}/corrected/bias")
    for reader in readers:
        reader.replace_source_output(added.output(0))
