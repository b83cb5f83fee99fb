"""Constants of layers: for rescaling by channel, with what they read, and in a reduced range."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial

import numpy as np

from neural_mp.adaptors.common.optional import StoredLayer
from neural_mp.adaptors.common.quant_params import (
    STEPS,
    IntegerWeight,
    find_saturating_layers,
    kinds_beyond_7_bits,
)
from neural_mp.adaptors.common.weights.cross_layer_scaling import LayerParams, LayerRescale, Window
from neural_mp.adaptors.openvino.fusion import (
    GraphStructure,
    get_kernel_kind,
    graph_structure,
    has_weight,
    is_product,
    moves_values,
)
from neural_mp.adaptors.openvino.graph.edit import (
    find_only_reader,
    get_constant_array,
    get_tensor_name,
    get_weight_output,
    give_name,
    is_constant,
    is_float,
    iterate_read_constants,
    name_of,
    rank_of,
    redirect_inputs,
)
from neural_mp.adaptors.openvino.graph.integer_weights import ALONE, is_table, make_weight_matrix
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, get_op_row, has_role
from neural_mp.adaptors.openvino.runtime import ops, ov
from neural_mp.core.int8_accumulation import REDUCED_RANGE, WEIGHT_LIMITS, KernelKind
from neural_mp.util.pytree import Array


def collect_layer_params(model: OpenVinoModel) -> dict[str, LayerParams]:
    """Return op → its constants."""
    return _params_by_layer(model.structure)


def _params_by_layer(graph: GraphStructure) -> dict[str, LayerParams]:
    layers = {name: _build_layer_params(graph, name, node) for name, node in graph.nodes.items()}
    return {name: layer for name, layer in layers.items() if layer is not None}


def _build_layer_params(graph: GraphStructure, name: str, node: ov.Node) -> LayerParams | None:
    axes = rank_of(node.output(0)) or 0
    if _scales_channels(node):
        addition = _find_following_addition(graph, name)
        result = name if addition is None else name_of(addition)
        return LayerParams(result, lambda: _read_constant_operand(node).reshape(-1))
    group = graph.fusion_groups.get(name)
    if group is None or not has_weight(node) or has_role(node, Role.TRANSPOSED):
        return None
    result = name if group.bias is None else group.bias.ops[-1]
    weight = partial(_read_weight_array, node)
    if has_role(node, Role.PRODUCT):
        transposed = bool(node.get_attributes()["transpose_b"])
        if node.get_attributes()["transpose_a"] or rank_of(get_weight_output(node)) != 2:
            return None
        outputs, inputs = (0, 1) if transposed else (1, 0)
        return LayerParams(result, weight, outputs, inputs)
    groups = int(get_weight_output(node).get_shape()[0]) if get_op_row(node).is_grouped else 1
    return LayerParams(
        result, weight, 0, 1, groups, 1 - axes, pooled=True, window=_read_conv_window(node)
    )


def _read_conv_window(node: ov.Node) -> Window:
    attributes = node.get_attributes()
    strides, dilations = tuple(attributes["strides"]), tuple(attributes["dilations"])
    if str(attributes["auto_pad"]) in ("same_upper", "same_lower"):
        return Window(strides, dilations, None, odd_before=attributes["auto_pad"] == "same_lower")
    pads = tuple(zip(attributes["pads_begin"], attributes["pads_end"], strict=True))
    return Window(strides, dilations, pads)


def _scales_channels(node: ov.Node) -> bool:
    """Whether an op multiplies the last axis by a constant, as the scales of norms do."""
    if not has_role(node, Role.SCALING):
        return False
    arrays = map(get_constant_array, node.input_values())
    constants = [array for array in arrays if array is not None]
    if len(constants) != 1 or rank_of(node.output(0)) is None or not is_float(node.output(0)):
        return False
    (scales,) = constants
    return bool(scales.ndim and scales.size == scales.shape[-1] > 1)


def _find_following_addition(graph: GraphStructure, name: str) -> ov.Node | None:
    """Return the op that adds a constant to an op's only read result; None if there is none."""
    node = find_only_reader(graph.nodes[name].output(0))
    if node is None or not has_role(node, Role.SUM) or name_of(node) not in graph.nodes:
        return None
    return node if any(map(is_constant, node.input_values())) else None


def _read_constant_operand(node: ov.Node) -> Array:
    return np.asarray(
        get_constant_array(node.input_value(_find_constant_position(node))), np.float32
    )


def _find_constant_position(node: ov.Node) -> int:
    return next(i for i in range(node.get_input_size()) if is_constant(node.input_value(i)))


def _read_weight_array(node: ov.Node) -> Array:
    """Return the weight of a layer; [groups · outputs, inputs, …] for grouped convolutions."""
    array = np.asarray(get_constant_array(get_weight_output(node)), np.float32)
    return array.reshape(-1, *array.shape[2:]) if get_op_row(node).is_grouped else array


def with_layer_params(model: OpenVinoModel, changes: Mapping[str, LayerRescale]) -> OpenVinoModel:
    """Return the model with changed constants in some layers."""
    program = model.program.clone()
    graph = graph_structure(program, model.rejected_ops)
    layers = _params_by_layer(graph)
    for name, change in changes.items():
        _rescale_layer(graph, name, layers[name], change)
    program.validate_nodes_and_infer_types()
    return replace(model, program=program, given=None, _runners={})


def _rescale_layer(
    graph: GraphStructure, name: str, layer: LayerParams, change: LayerRescale
) -> None:
    node = graph.nodes[name]
    index = _find_constant_position(node) if _scales_channels(node) else get_op_row(node).weight
    shape = list(node.input_value(index).get_shape())
    weight = change.rescale_weight(layer)
    _replace_constant(node, index, weight.reshape(shape), f"{name}/corrected/weight")
    channels = weight.shape[layer.outputs]
    if layer.result == name:
        if change.shift is not None:
            readers = list(node.output(0).get_target_inputs())
            added = ops.add(
                node, ops.constant(_reshape_bias(change.rescale_bias(None, channels), node))
            )
            redirect_inputs(readers, give_name(f"{name}/corrected/bias", added))
        return
    addition = graph.nodes[layer.result]
    summand = np.broadcast_to(_read_constant_operand(addition).reshape(-1), channels)
    bias = _reshape_bias(change.rescale_bias(summand, channels), node)
    _replace_constant(addition, _find_constant_position(addition), bias, f"{name}/corrected/bias")


def _reshape_bias(bias: Array, node: ov.Node) -> Array:
    shape = [1] * (rank_of(node.output(0)) or 1)
    shape[get_op_row(node).channels] = -1
    return np.asarray(bias.reshape(shape), np.float32)


def _replace_constant(node: ov.Node, position: int, values: Array, name: str) -> None:
    constant = give_name(name, ops.constant(np.ascontiguousarray(values, np.float32)))
    redirect_inputs([node.input(position)], constant)


def collect_stored_layers(model: OpenVinoModel) -> dict[str, StoredLayer]:
    """Return op → its weight and the tensor that it reads."""
    structure = model.structure
    return {
        name: StoredLayer(
            partial(make_weight_matrix, node),
            None if is_table(node) else get_tensor_name(node.input_value(0)),
        )
        for name, node in structure.nodes.items()
        if is_table(node) or (name in structure.fusion_groups and has_role(node, Role.PRODUCT))
    }


#: Suffix of the names of constants with halved integers.
REDUCED = "/reduced"


def _iterate_integer_weights(program: ov.Model) -> Iterator[IntegerWeight[ov.Node]]:
    """Yield the int8 weights of layers, except those stored alone.

    The plugin multiplies the latter in a kernel that adds up without saturation, even if the input
    is quantized for other readers.
    """
    for node in program.get_ordered_ops():
        if get_op_row(node).kernel is None:
            continue
        constants = {
            name_of(c): c
            for c in iterate_read_constants(node)
            if c.get_element_type() == ov.Type.i8
        }
        if any(f"{ALONE}/" in name for name in constants):
            continue
        integers = [np.asarray(constant.get_data()) for constant in constants.values()]
        if has_role(node, Role.SEQUENCE) and integers:  # its weights have the same scales
            integers = [np.concatenate([array.ravel() for array in integers])] * len(constants)
        for constant, array in zip(constants.values(), integers, strict=True):
            yield IntegerWeight(constant, get_kernel_kind(node), array)


def full_range_kernels(model: OpenVinoModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with a weight beyond ±63."""
    products = {KernelKind.DENSE} if any(_iterate_quantized_factors(model.active_graph)) else set()
    return kinds_beyond_7_bits(_iterate_integer_weights(model.active_graph)) | products


def _iterate_quantized_factors(program: ov.Model) -> Iterator[ov.Node]:
    """Yield the FakeQuantize of the second factor of every INT8 product of computed matrices."""
    for node in program.get_ordered_ops():
        if not is_product(node):
            continue
        factor = node.input_value(1).get_node()
        while moves_values(factor):
            factor = factor.input_value(0).get_node()
        if has_role(factor, Role.QUANTIZATION) and factor.get_attributes()["levels"] == STEPS + 1:
            yield factor


def with_reduced_range(model: OpenVinoModel) -> OpenVinoModel:
    """Return the model with weights of at most ±63 in kernels that may saturate.

    Integers are halved and scales doubled, which costs one bit of the weights. Second factors of
    products of computed matrices lose a bit as well, and the plugin computes these in float.
    """
    program = model.active_graph.clone()
    limit = WEIGHT_LIMITS[REDUCED_RANGE]
    for constant in find_saturating_layers(_iterate_integer_weights(program)):
        halved = np.clip(np.rint(np.asarray(constant.get_data()) / 2), -limit, limit)
        smaller = give_name(f"{name_of(constant)}{REDUCED}", ops.constant(halved.astype(np.int8)))
        for reader in list(constant.output(0).get_target_inputs()):
            reader.replace_source_output(smaller.output(0))
            _double_scales(reader.get_node())
    for factor in {name_of(node): node for node in _iterate_quantized_factors(program)}.values():
        _halve_levels(factor)
    program.validate_nodes_and_infer_types()
    original = None if model.given is None else program
    return replace(model, program=program, given=original, _runners={})


def _halve_levels(factor: ov.Node) -> None:
    """Round a tensor to every second level, for which the plugin has no integer kernels."""
    low, high = (np.asarray(get_constant_array(factor.input_value(index))) for index in (1, 2))
    high = high - (high - low) / STEPS
    half = ops.fake_quantize(factor.input_value(0), low, high, low, high, (STEPS + 1) // 2)
    readers = list(factor.output(0).get_target_inputs())
    redirect_inputs(readers, give_name(f"{name_of(factor)}{REDUCED}", half))


def _double_scales(convert: ov.Node) -> None:
    inserted = None
    for reader in list(convert.output(0).get_target_inputs()):
        node, index = reader.get_node(), 1 - reader.get_index()
        is_scaling = has_role(node, Role.SCALING)
        scales = get_constant_array(node.input_value(index)) if is_scaling else None
        if scales is not None:
            doubled = ops.constant(scales * np.float32(2))
            node.input(index).replace_source_output(doubled.output(0))
            continue
        if inserted is None:
            doubled = ops.multiply(convert, ops.constant(np.float32(2)))
            inserted = give_name(f"{name_of(convert)}/doubled", doubled)
        reader.replace_source_output(inserted.output(0))
