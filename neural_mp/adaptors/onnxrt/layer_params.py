"""Constants of layers: for rescaling by channel, with what they read, and in a reduced range."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.optional import StoredLayer
from neural_mp.adaptors.common.quant_params import (
    IntegerWeight,
    find_saturating_layers,
    kinds_beyond_7_bits,
)
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale, Window
from neural_mp.adaptors.onnxrt.fusion import GraphStructure, graph_structure, is_table
from neural_mp.adaptors.onnxrt.graph import edit
from neural_mp.adaptors.onnxrt.graph.edit import require_constant_array
from neural_mp.adaptors.onnxrt.graph.subgraphs import in_order
from neural_mp.adaptors.onnxrt.kernels.ops import (
    KERNEL_WEIGHTS,
    Role,
    get_kernel_kind,
    get_op_row,
    get_weight_axes,
    has_role,
    is_dequantize,
    is_product,
)
from neural_mp.adaptors.onnxrt.kernels.tensor_variants import to_unsigned
from neural_mp.adaptors.onnxrt.kernels.writers import matrix_and_bias
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.util.pytree import Array


def collect_layer_params(model: OnnxModel) -> dict[str, LayerParams]:
    """Return op → its constants."""
    return _params_by_layer(model.structure)


def _params_by_layer(graph: GraphStructure) -> dict[str, LayerParams]:
    layers = {name: _build_layer_params(graph, name, node) for name, node in graph.nodes.items()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def _build_layer_params(graph: GraphStructure, name: str, node: ir.Node) -> LayerParams | None:
    scales = _find_scales_position(node)
    if scales is not None:
        value = edit.get_node_input(node, scales)
        return LayerParams(name, lambda: edit.require_constant_array(value).reshape(-1))
    value, numbers = edit.get_node_input(node, 1), node.attributes
    is_norm = node.op_type == "LayerNormalization" and not node.domain
    if not (is_norm or has_role(node, Role.LAYER)) or value is None:
        return None
    if value.const_value is None or value.shape is None:
        return None
    weight, axes = partial(edit.require_constant_array, value), len(value.shape)
    has_bias, (outputs, inputs) = get_op_row(node).bias is not None, get_weight_axes(node)
    if has_bias and not _has_plain_bias(node, value.shape[outputs]):
        return None
    if is_norm:
        return LayerParams(name, weight) if axes == 1 else None
    if not is_product(node):
        groups = numbers.get_int("group", 1)
        window = _read_conv_window(node, axes - 2)
        return LayerParams(name, weight, 0, 1, groups, 1 - axes, pooled=True, window=window)
    if has_bias:
        factors = numbers.get_float("alpha", 1.0), numbers.get_float("beta", 1.0)
        if numbers.get_int("transA", 0) or factors != (1, 1):
            return None
        return LayerParams(name, weight, outputs=outputs, inputs=inputs)
    group = graph.fusion_groups.get(name)
    if axes != 2 or group is None:
        return None
    result = str(group.tail.name) if group.bias is not None else name
    return LayerParams(result, weight, outputs, inputs, shifts=group.bias is not None)


def _read_conv_window(node: ir.Node, axes: int) -> Window:
    numbers, ones = node.attributes, [1] * axes
    strides, dilations = (tuple(numbers.get_ints(name, ones)) for name in ("strides", "dilations"))
    same = numbers.get_string("auto_pad", "NOTSET")
    if same in ("SAME_UPPER", "SAME_LOWER"):
        return Window(strides, dilations, None, odd_before=same == "SAME_LOWER")
    pads = tuple(numbers.get_ints("pads", [0] * (2 * axes)))
    return Window(strides, dilations, tuple(zip(pads[:axes], pads[axes:], strict=True)))


def _find_scales_position(node: ir.Node) -> int | None:
    """Return the position of a constant by which a Mul scales the last axis, as RMS norms do."""
    if node.domain or node.op_type != "Mul" or len(node.inputs) != 2:
        return None
    constant = [value is not None and value.const_value is not None for value in node.inputs]
    if sum(constant) != 1:
        return None
    position = constant.index(True)
    value = node.inputs[position]
    shape = None if value is None else value.shape
    sizes = () if shape is None else shape.numpy()
    rank = None if node.outputs[0].shape is None else len(node.outputs[0].shape)
    is_scale = sizes and math.prod(sizes) == sizes[-1] > 1 and (rank is None or rank >= len(sizes))
    return position if is_scale and edit.is_float32(node.outputs[0]) else None


def _has_plain_bias(node: ir.Node, channels: object) -> bool:
    """Whether the bias of a layer is omitted, or a constant per channel or for all channels."""
    value = edit.get_node_input(node, 2)
    bias = edit.get_constant_array(value)
    if bias is None:
        return value is None
    return bias.size == 1 or bias.size == bias.shape[-1] == channels


def with_layer_params(model: OnnxModel, changes: Mapping[str, LayerRescale]) -> OnnxModel:
    """Return the model with changed constants in some layers."""
    program = model.program.clone()
    graph, names = graph_structure(program, model.rejected_ops), edit.GraphNames(program.graph)
    layers = _params_by_layer(graph)
    for name, change in changes.items():
        _rescale_layer(graph, name, layers[name], change, names)
    return replace(model, program=program, given=None, _runners={})


def _rescale_layer(
    graph: GraphStructure,
    name: str,
    layer: LayerParams,
    change: LayerRescale,
    names: edit.GraphNames,
) -> None:
    node, weight = graph.nodes[name], change.rescale_weight(layer)
    scales = _find_scales_position(node)
    if scales is not None:
        weight = weight.reshape(edit.require_constant_array(node.inputs[scales]).shape)
        edit.put_input(node, scales, names.add_constant(f"{name}/corrected/weight", weight))
        return
    edit.put_input(node, 1, names.add_constant(f"{name}/corrected/weight", weight))
    addition, position = _locate_bias(graph, name, node)
    original = (
        edit.get_constant_array(edit.get_node_input(addition, position))
        if addition is not None
        else None
    )
    if addition is None or (original is None and change.shift is None):
        return
    channels = weight.shape[layer.outputs]
    per_channel = None if original is None else np.broadcast_to(original.reshape(-1), channels)
    bias = change.rescale_bias(per_channel, channels)
    if original is not None and original.size == channels:
        bias = bias.reshape(original.shape)  # the bias of a product may have more axes
    edit.put_input(addition, position, names.add_constant(f"{name}/corrected/bias", bias))


def _locate_bias(graph: GraphStructure, name: str, node: ir.Node) -> tuple[ir.Node | None, int]:
    """Return the node that reads the bias and the position; for MatMul, the Add after it."""
    position = get_op_row(node).bias
    if position is not None:
        return node, position
    step = graph.fusion_groups[name].bias
    if step is None:
        return None, 0
    (addition,) = step.ops
    return addition, list(addition.inputs).index(step.operand)


def collect_stored_layers(model: OnnxModel) -> dict[str, StoredLayer]:
    """Return op → its weight and the tensor that it reads."""
    stored = {}
    for name, node in model.structure.nodes.items():
        if is_table(node):
            stored[name] = StoredLayer(partial(require_constant_array, node.inputs[0]))
        elif name in model.structure.fusion_groups and is_product(node):
            tensor = model.structure.names.get(node.inputs[0]) if node.inputs[0] else None
            weight = node.inputs[1]
            if tensor is not None and weight is not None and weight.const_value is not None:
                stored[name] = StoredLayer(partial(_transpose_dense_weight, node), tensor)
    return stored


def _transpose_dense_weight(node: ir.Node) -> Array:
    return np.ascontiguousarray(matrix_and_bias(node)[0].T)


@dataclass(frozen=True)
class _Read:
    """A node that reads a weight, with the positions of the weight and its zero point."""

    node: ir.Node
    weight: int
    zero_point: int


def full_range_kernels(model: OnnxModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with a signed weight beyond ±63."""
    return kinds_beyond_7_bits(_iterate_integer_weights(model.active_graph.graph))


def with_unsigned_weights(model: OnnxModel) -> OnnxModel:
    """Return the model with unsigned weights in kernels that may saturate: equal results."""
    program = model.active_graph.clone()
    names = edit.GraphNames(program.graph)
    for usage in find_saturating_layers(_iterate_integer_weights(program.graph)):
        node, weight = usage.node, usage.node.inputs[usage.weight]
        integers = edit.require_constant_array(weight)
        assert weight is not None
        zeros = _read_zero_points(usage, integers)
        for index, value, suffix in (
            (usage.weight, integers, "uint8"),
            (usage.zero_point, zeros, "middle"),
        ):
            edit.put_input(
                node, index, names.add_constant(f"{weight.name}/{suffix}", to_unsigned(value))
            )
    common.RemoveUnusedNodesPass()(program)
    original = None if model.given is None else program
    return replace(model, program=program, given=original, _runners={})


def _read_zero_points(usage: _Read, integers: Array) -> Array:
    """Return the zero points; if there are none, zeros of the shape of the scales."""
    node = usage.node
    array = edit.get_constant_array(edit.get_node_input(node, usage.zero_point))
    if array is not None:
        return array
    scales = edit.get_constant_array(node.inputs[1]) if is_dequantize(node) else None
    return np.zeros(scales.shape if scales is not None else (), integers.dtype)


def _iterate_integer_weights(graph: ir.Graph) -> Iterator[IntegerWeight[_Read]]:
    """Yield the signed weights of INT8 products, once per node that reads them."""
    for node in in_order(graph):
        multiplying: ir.Node | None = node
        positions = KERNEL_WEIGHTS.get(node.op_type, ())
        if is_dequantize(node):
            users = (user for user, position in node.outputs[0].uses() if position == 1)
            fused = (
                user
                for user in users
                if has_role(user, Role.LAYER)
                and (data := user.inputs[0]) is not None
                and (source := data.producer()) is not None
                and is_dequantize(source)
            )
            positions, multiplying = ((0, 2),), next(fused, None)
        if multiplying is None:
            continue
        for weight, zero_point in positions:
            value = edit.get_node_input(node, weight)
            integers = edit.get_constant_array(value)
            if integers is not None and integers.dtype == np.int8:
                usage = _Read(node, weight, zero_point)
                yield IntegerWeight(usage, get_kernel_kind(multiplying, value), integers)
