"""Structure of a graph: fusion groups, and ops that join or pass on INT8."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common import fusion
from neural_mp.adaptors.common.fusion import BIAS, FusionRules, find_fusion_groups, fused_into
from neural_mp.adaptors.common.naming import reserve_name
from neural_mp.adaptors.onnxrt.constant_folding import is_constant
from neural_mp.adaptors.onnxrt.graph_edit import array_of, input_of, is_float32, used_outputs
from neural_mp.adaptors.onnxrt.kernel_registry import moves_bytes
from neural_mp.adaptors.onnxrt.opset import opset_of
from neural_mp.adaptors.onnxrt.subgraphs import body_inputs, in_order

FusionGroup = fusion.FusionGroup[ir.Node, ir.Value]
Step = fusion.Step[ir.Node, ir.Value]

#: Layers with a constant weight as second input.
LAYERS = ("Conv", "MatMul", "Gemm")
#: Ops whose integer kernel has scales for inputs and output, e.g. `QLinearAdd`.
JOINERS = (
    "Add",
    "Mul",
    "Concat",
    "AveragePool",
    "GlobalAveragePool",
    "Sigmoid",
    "LeakyRelu",
    "ReduceMean",
)
#: Rank of images: samples, channels, two axes of positions.
_LEAST_IMAGE_RANK = 4
#: Ops that only move or select values; ONNX Runtime has uint8 kernels of most.
_AGNOSTIC = (
    "MaxPool",
    "Reshape",
    "Transpose",
    "Flatten",
    "Squeeze",
    "Unsqueeze",
    "Slice",
    "Split",
    "Gather",
    "Expand",
    "Tile",
    "DepthToSpace",
    "SpaceToDepth",
    "Pad",
    "Resize",
    "Identity",
)


@dataclass(frozen=True)
class GraphStructure:
    """The structure of a graph.

    Attributes:
        nodes: op → node, in graph order; nodes of bodies precede the node that runs them.
        fusion_groups: layer or joining op → its fusion group.
        layer_of: op that may be fused → the op that it is fused into.
        agnostic_ops: the quantize-agnostic ops.
        alone: the ops with float inputs and outputs but INT8 weights: lookups in constant tables,
            e.g. embeddings, and recurrent layers.
        values: tensor → value. A tensor has the name of its op or input; further results of an op
            have their own names (`split:1`).
        names: value → tensor.
        given_to_bodies: the per-step inputs of bodies that are known to be float32.
        parts: tensor that is a further result → the op.
    """

    nodes: Mapping[str, ir.Node]
    fusion_groups: Mapping[str, FusionGroup]
    layer_of: Mapping[str, str]
    agnostic_ops: frozenset[str]
    alone: frozenset[str]
    values: Mapping[str, ir.Value]
    names: Mapping[ir.Value, str]
    given_to_bodies: tuple[ir.Value, ...]
    parts: Mapping[str, str]


def structure(program: ir.Model, rejected: Collection[str] = ()) -> GraphStructure:
    """Return the structure of a canonicalized graph.

    `rejected` are ops that cannot run between integer ops, whatever their kernels.
    """
    graph, opset = program.graph, opset_of(program)
    nodes = {str(node.name): node for node in in_order(graph) if not is_constant(node)}
    step_inputs = tuple(filter(is_float32, body_inputs(graph)))
    fed = [*(value for value in graph.inputs if not value.is_initializer()), *step_inputs]
    values = {str(value.name): value for value in fed}
    parts: dict[str, str] = {}
    reserved = {*nodes, *values}
    for name, node in nodes.items():
        for index, value in enumerate(used_outputs(node)):
            tensor = name
            if index:
                tensor = reserve_name(f"{name}:{node.outputs.index(value)}", reserved)
                parts[tensor] = name
            values[tensor] = value
    sound = {name: node for name, node in nodes.items() if name not in rejected}
    heads = [node for node in sound.values() if _heads(node)]
    groups = find_fusion_groups(heads, _Kernels(rejected))
    return GraphStructure(
        nodes,
        {str(head.name): group for head, group in groups.items()},
        {str(op.name): str(head.name) for op, head in fused_into(groups.values()).items()},
        frozenset(name for name, node in sound.items() if _moves(node, opset)),
        frozenset(name for name, node in nodes.items() if is_table(node) or is_recurrent(node)),
        values,
        {value: tensor for tensor, value in values.items()},
        step_inputs,
        parts,
    )


def is_table(node: ir.Node) -> bool:
    """Whether an op is a lookup in a constant float32 table, e.g. an embedding."""
    if node.domain or node.op_type != "Gather":
        return False
    (table, rows), axis = node.inputs, node.attributes.get_int("axis", 0)
    if axis or rows is None or rows.const_value is not None or not is_float32(table):
        return False
    if table is None or table.const_value is None:
        return False
    return table.shape is not None and len(table.shape) == 2


def has_weight(node: ir.Node) -> bool:
    """Whether an op is a layer with a constant weight."""
    weight = input_of(node, 1)
    return node.op_type in LAYERS and weight is not None and weight.const_value is not None


def is_recurrent(node: ir.Node) -> bool:
    """Whether an op is a recurrent layer with integer kernels."""
    return not node.domain and node.op_type in ("LSTM", "GRU")


def _heads(node: ir.Node) -> bool:
    if node.domain or not is_float32(node.outputs[0]) or not node.inputs:
        return False
    if node.op_type in LAYERS:
        return True
    if node.op_type == "ReduceMean" and not averages_images(node):
        return False
    computed = all(value is not None and value.const_value is None for value in joined(node))
    return node.op_type in JOINERS and computed and len(used_outputs(node)) == 1


def joined(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Return the inputs of a joining op that its integer kernel reads."""
    return tuple(node.inputs[:1] if node.op_type == "ReduceMean" else node.inputs)


def averages_images(node: ir.Node) -> bool:
    """Whether a ReduceMean averages all positions of an image: its integer kernel is a pooling."""
    data, axes_input = node.inputs[0], input_of(node, 1)
    axes = node.attributes.get_ints("axes", ()) if axes_input is None else array_of(axes_input)
    if data is None or data.shape is None or axes is None or len(data.shape) < _LEAST_IMAGE_RANK:
        return False
    rank = len(data.shape)
    return sorted(int(axis) % rank for axis in axes) == list(range(2, rank))


def is_pointwise(node: ir.Node) -> bool:
    """Whether an op is a convolution that multiplies each position by one matrix."""
    weight, numbers = input_of(node, 1), node.attributes
    if node.op_type != "Conv" or node.domain or weight is None or weight.const_value is None:
        return False
    return (
        set(weight.const_value.shape.numpy()[2:]) == {1}
        and numbers.get_int("group", 1) == 1
        and set(numbers.get_ints("strides", [1])) == {1}
        and not any(numbers.get_ints("pads", [0]))
    )


class _Kernels(FusionRules[ir.Node, ir.Value]):
    """The epilogues of ONNX Runtime's integer kernels.

    Args:
        rejected: ops that no kernel runs.
    """

    def __init__(self, rejected: Collection[str]) -> None:
        self._rejected = rejected

    def bias(self, group: FusionGroup) -> Step | None:
        step = _only_reader(group.tail.outputs[0])
        if step is None or group.head.op_type != "MatMul":
            return None
        bias = _bias(group.head, step)
        return Step(BIAS, (step,), bias) if bias is not None else None

    def activation(self, group: FusionGroup) -> Step | None:
        step = _only_reader(group.tail.outputs[0])
        if step is None or group.head.op_type not in ("Conv", "Add") or limits(step) is None:
            return None
        if step.name in self._rejected:
            return None
        return Step(step.op_type, (step,))


def _only_reader(value: ir.Value) -> ir.Node | None:
    if value.is_graph_output() or len(value.uses()) != 1:
        return None
    (use,) = value.uses()
    return use.node if use.node.graph is value.graph and not use.node.domain else None


def limits(node: ir.Node) -> tuple[float, float] | None:
    """Return the bounds of an activation's result; None for other ops."""
    if node.op_type == "Relu":
        return 0.0, np.inf
    if node.op_type != "Clip":
        return None
    bounds = [-np.inf, np.inf]
    for index in (1, 2):
        bound = input_of(node, index)
        if bound is None:
            continue
        array = array_of(bound)
        if array is None or array.size != 1:
            return None
        bounds[index - 1] = float(array.reshape(()))
    low, high = bounds
    return (low, high) if low <= 0 <= high else None


def _bias(product: ir.Node, step: ir.Node) -> ir.Value | None:
    """Return the constant that an addition adds to every row of a product."""
    if step.op_type != "Add":
        return None
    weight, result = product.inputs[1], product.outputs[0]
    for value in step.inputs:
        array = array_of(value)
        if array is None or weight is None or weight.shape is None or len(weight.shape) != 2:
            continue
        columns = array.size == array.shape[-1] == weight.shape[1] if array.ndim else False
        grows = array.ndim > 1 and (result.shape is None or array.ndim > len(result.shape))
        if columns and not grows:
            return value
    return None


def _moves(node: ir.Node, opset: int) -> bool:
    """Whether an op yields the same on quantized as on float values."""
    if node.domain or node.op_type not in _AGNOSTIC or not is_float32(node.outputs[0]):
        return False
    if node.inputs[0] is None or node.inputs[0].const_value is not None:
        return False
    if any(value is not None and value.const_value is None for value in node.inputs[1:]):
        return False
    if not moves_bytes(node, opset):
        return False
    if node.op_type == "Resize":
        transform = node.attributes.get_string("coordinate_transformation_mode")
        nearest = node.attributes.get_string("mode", "nearest") == "nearest"
        return nearest and transform != "tf_crop_and_resize"
    if node.op_type == "Pad":
        padding = array_of(input_of(node, 2))
        return padding is None or not padding.any()
    return node.op_type != "MaxPool" or len(used_outputs(node)) == 1
