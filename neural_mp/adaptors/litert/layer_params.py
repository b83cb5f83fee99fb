"""Constants of layers: for rescaling by channel, and with what they read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from ai_edge_litert import schema_py_generated as schema

from neural_mp.adaptors.common.optional import StoredLayer
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale, Window
from neural_mp.adaptors.litert.graph.program import drop_unused_buffers
from neural_mp.adaptors.litert.model import LiteRtModel, Structure
from neural_mp.adaptors.litert.ops import Role, get_op_row
from neural_mp.util.pytree import Array

#: Activations within a layer that leave positive factors of channels in place.
_HOMOGENEOUS = (schema.ActivationFunctionType.NONE, schema.ActivationFunctionType.RELU)


def collect_layer_params(model: LiteRtModel) -> dict[str, LayerParams]:
    """Return op → its constants, of layers whose channels may be scaled."""
    structure = model.structure
    layers = {name: _build_layer_params(structure, name) for name in structure.ops}
    return {name: layer for name, layer in layers.items() if layer is not None}


def _build_layer_params(structure: Structure, name: str) -> LayerParams | None:
    kind, op = structure.get_type(name), structure.ops[name]
    row = get_op_row(kind)
    if not row.role & Role.LAYER or kind == "TRANSPOSE_CONV" or not structure.has_weight(name):
        return None
    if op.builtinOptions.fusedActivationFunction not in _HOMOGENEOUS:
        return None
    weight = partial(_read_layer_weight, structure, name)
    shifts = structure.find_bias(name) is not None
    if row.role is Role.DENSE:
        return LayerParams(name, weight, 0, 1, shifts=shifts)
    shape = structure.get_weight(name).shape
    depth = int(structure.program.main.tensors[op.inputs[row.data]].shape[3])
    groups = depth if kind == "DEPTHWISE_CONV_2D" else depth // shape[3]
    return LayerParams(
        name,
        weight,
        0,
        3,
        groups,
        pooled=True,
        window=_read_window(op.builtinOptions),
        shifts=shifts,
    )


def _read_layer_weight(structure: Structure, name: str) -> Array:
    """Return a weight as [outputs, height, width, inputs], or [outputs, inputs]."""
    weight = structure.get_weight(name)
    if structure.get_type(name) == "DEPTHWISE_CONV_2D":
        return np.moveaxis(weight, 3, 0).transpose(0, 2, 3, 1)
    return weight


def _read_window(options: Any) -> Window | None:
    strides = (int(options.strideH), int(options.strideW))
    dilations = (int(options.dilationHFactor), int(options.dilationWFactor))
    if options.padding == schema.Padding.SAME:
        return Window(strides, dilations, None)
    return Window(strides, dilations, ((0, 0), (0, 0)))


def with_layer_params(model: LiteRtModel, changes: Mapping[str, LayerRescale]) -> LiteRtModel:
    """Return the model with changed constants in some layers."""
    program = model.program.copy()
    structure, layers = Structure(program), collect_layer_params(model)
    for name, change in changes.items():
        weight = change.rescale_weight(layers[name])
        row, kind = get_op_row(structure.get_type(name)), structure.get_type(name)
        if kind == "DEPTHWISE_CONV_2D":
            weight = np.moveaxis(weight.transpose(0, 3, 1, 2), 0, 3)
        _replace_constant(structure, int(structure.ops[name].inputs[row.weight]), weight)
        bias = structure.find_bias(name)
        value = None if bias is None else structure.program.get_constant(bias)
        if bias is not None and value is not None:
            _replace_constant(structure, bias, change.rescale_bias(value, value.size))
    drop_unused_buffers(program.tree)
    return replace(model, program=program, given=None, _runners={})


def _replace_constant(structure: Structure, index: int, value: Array) -> None:
    """Give a tensor a buffer of its own with new values; others may share the old one."""
    tree = structure.program.tree
    buffer = schema.BufferT()
    buffer.data = np.frombuffer(np.ascontiguousarray(value, np.float32).tobytes(), np.uint8)
    tree.buffers.append(buffer)
    structure.program.main.tensors[index].buffer = len(tree.buffers) - 1


def collect_stored_layers(model: LiteRtModel) -> dict[str, StoredLayer]:
    """Return op → its weight and the tensor that it reads, of dense layers and tables."""
    structure = model.structure
    layers = {}
    for name in structure.ops:
        row = get_op_row(structure.get_type(name))
        if not structure.has_weight(name) or not row.role & (Role.DENSE | Role.TABLE):
            continue
        weight = partial(_read_matrix, structure, name)
        read = structure.program.tensor_name(int(structure.ops[name].inputs[row.data]))
        layers[name] = StoredLayer(weight, None if structure.has_table(name) else read)
    return layers


def _read_matrix(structure: Structure, name: str) -> Array:
    weight = structure.get_weight(name)
    return weight.reshape(len(weight), -1)
