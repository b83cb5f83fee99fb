"""The constants of layers, to be scaled channel by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import onnx_ir as ir

from neural_mp.adaptors.common.channel_scaling import Array, Layer, LayerChange
from neural_mp.adaptors.common.free_names import unused
from neural_mp.adaptors.onnxrt.fusion import LAYERS, GraphStructure, structure
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.naming import constant, names_in
from neural_mp.adaptors.onnxrt.sessions import array_of

_NORM = "LayerNormalization"


def layers(found: GraphStructure) -> dict[str, Layer]:
    """Op → its constants."""
    made = {name: _layer(found, name, node) for name, node in found.nodes.items()}
    return {name: layer for name, layer in made.items() if layer is not None}


def _layer(found: GraphStructure, name: str, node: ir.Node) -> Layer | None:
    if node.domain or node.op_type not in (*LAYERS, _NORM) or len(node.inputs) < 2:
        return None
    value = node.inputs[1]
    if value is None or value.const_value is None or value.shape is None:
        return None

    def weight() -> Array:
        array = array_of(value)
        assert array is not None
        return array

    numbers = {key: attribute.value for key, attribute in node.attributes.items()}
    axes = len(value.shape)
    across = node.op_type == "Conv" or bool(numbers.get("transB"))
    if node.op_type != "MatMul" and not _has_plain_bias(node, value.shape[0 if across else -1]):
        return None
    if node.op_type == _NORM:
        return Layer(name, weight) if axes == 1 else None
    if node.op_type == "Conv":
        return Layer(name, weight, 0, 1, numbers.get("group", 1), axis=1 - axes, pooled=True)
    if node.op_type == "Gemm":
        if numbers.get("transA") or numbers.get("alpha", 1) != 1 or numbers.get("beta", 1) != 1:
            return None
        return Layer(name, weight, outputs=0 if across else 1, inputs=1 if across else 0)
    fusion_group = found.fusion_groups.get(name)
    if axes != 2 or fusion_group is None:
        return None
    result = str(fusion_group.tail.name) if fusion_group.bias is not None else name
    return Layer(result, weight, outputs=1, inputs=0)


def _has_plain_bias(node: ir.Node, channels: Any) -> bool:
    """Whether the bias of a layer is left out, or a constant for every channel, or one for all."""
    if len(node.inputs) < 3 or node.inputs[2] is None:
        return True
    bias = array_of(node.inputs[2])
    return bias is not None and (bias.size == 1 or bias.size == bias.shape[-1] == channels)


def with_layers(model: OnnxModel, changes: Mapping[str, LayerChange]) -> OnnxModel:
    """The model with other constants in some of its layers."""
    program = model.program.clone()
    found = structure(program)
    known = layers(found)
    names = set(names_in(program.graph))
    for name, change in changes.items():
        _change(program.graph, found, name, known[name], change, names)
    return replace(model, program=program, given=None, _runners={})


def _change(
    graph: ir.Graph,
    found: GraphStructure,
    name: str,
    layer: Layer,
    change: LayerChange,
    names: set[str],
) -> None:
    def added(stem: str, value: Array) -> ir.Value:
        free = unused(f"{name}/repaired/{stem}", names)
        names.add(free)
        return constant(graph, free, value)

    node = found.nodes[name]
    weight = change.weight(layer)
    node.replace_input_with(1, added("weight", weight))
    if node.op_type == "MatMul":
        fusion_group = found.fusion_groups[name]
        if fusion_group.bias is not None:
            bias = array_of(fusion_group.bias)
            assert bias is not None
            values = change.bias(bias.reshape(-1), bias.size).reshape(bias.shape)
            step = fusion_group.steps[-1]
            step.replace_input_with(
                list(step.inputs).index(fusion_group.bias), added("bias", values)
            )
        return
    bias = array_of(node.inputs[2]) if len(node.inputs) > 2 else None
    if bias is None and change.shift is None:
        return
    channels = weight.shape[layer.outputs]
    node.resize_inputs(max(len(node.inputs), 3))
    if bias is not None:
        bias = (bias.reshape(-1) + bias.dtype.type(0)).repeat(channels if bias.size == 1 else 1)
    node.replace_input_with(2, added("bias", change.bias(bias, channels)))
