"""Structure of a graph: fusion groups, and ops that join or pass on INT8."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from neural_mp.adaptors.common.kernels import fusion
from neural_mp.adaptors.common.kernels.fusion import (
    BIAS,
    FusionRules,
    find_fusion_groups,
    map_fused_ops,
)
from neural_mp.adaptors.common.naming import reserve_name
from neural_mp.adaptors.onnxrt.constant_folding import is_constant
from neural_mp.adaptors.onnxrt.graph.edit import get_constant_array, is_float32, list_used_outputs
from neural_mp.adaptors.onnxrt.graph.opset import get_onnx_opset
from neural_mp.adaptors.onnxrt.graph.subgraphs import (
    find_runners,
    in_order,
    iterate_node_bodies,
)
from neural_mp.adaptors.onnxrt.kernels.ops import Role, get_op_row, has_role
from neural_mp.adaptors.onnxrt.kernels.registry import moves_bytes
from neural_mp.adaptors.onnxrt.kernels.writers import FusionGroup, get_clamp_limits

Step = fusion.Step[ir.Node, ir.Value]


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


def graph_structure(program: ir.Model, rejected: Collection[str] = ()) -> GraphStructure:
    """Return the structure of a canonicalized graph.

    `rejected` are ops that cannot run between integer ops, whatever their kernels.
    """
    graph, opset = program.graph, get_onnx_opset(program)
    nodes = {str(node.name): node for node in in_order(graph) if not is_constant(node)}
    inputs = (v for body in find_runners(graph) for v in body.inputs if not v.is_initializer())
    step_inputs = tuple(filter(is_float32, inputs))
    fed = [*(value for value in graph.inputs if not value.is_initializer()), *step_inputs]
    values = {str(value.name): value for value in fed}
    parts: dict[str, str] = {}
    reserved = {*nodes, *values}
    for name, node in nodes.items():
        for index, value in enumerate(list_used_outputs(node)):
            tensor = name
            if index:
                tensor = reserve_name(f"{name}:{node.outputs.index(value)}", reserved)
                parts[tensor] = name
            values[tensor] = value
    sound = {name: node for name, node in nodes.items() if name not in rejected}
    decoding = find_decoding_concatenations(graph)
    heads = [node for node in sound.values() if _may_head_group(node) and node not in decoding]
    groups = find_fusion_groups(heads, _Kernels(rejected))
    return GraphStructure(
        nodes,
        {str(head.name): group for head, group in groups.items()},
        {str(op.name): str(head.name) for op, head in map_fused_ops(groups.values()).items()},
        frozenset(name for name, node in sound.items() if _is_agnostic_op(node, opset)),
        frozenset(
            name for name, node in nodes.items() if is_table(node) or has_role(node, Role.RECURRENT)
        ),
        values,
        {value: tensor for tensor, value in values.items()},
        step_inputs,
        parts,
    )


def find_decoding_concatenations(graph: ir.Graph) -> set[ir.Node]:
    """Return the concatenations whose result no layer reads, unless through ops in float.

    A concatenation in integers has one scale. Behind the last layers of a detector, these join
    boxes and scores, one of which would lose its scale, and no integer kernel gains.
    """
    passing = (Role.JOINING, Role.MOVING)
    read_by_layer: set[ir.Node] = set()
    for node in reversed(list(in_order(graph))):
        for reader in (use.node for value in node.outputs for use in value.uses()):
            inner = reader.graph is not graph or any(True for _ in iterate_node_bodies(reader))
            is_layer = has_role(reader, Role.LAYER) or has_role(reader, Role.RECURRENT)
            passes_on = reader in read_by_layer and any(has_role(reader, r) for r in passing)
            if inner or is_layer or passes_on:
                read_by_layer.add(node)
    return {node for node in graph if node.op_type == "Concat" and node not in read_by_layer}


def is_table(node: ir.Node) -> bool:
    """Whether an op is a lookup in a constant float32 table, e.g. an embedding."""
    if not has_role(node, Role.TABLE):
        return False
    (table, rows), axis = node.inputs, node.attributes.get_int("axis", 0)
    if axis or rows is None or rows.const_value is not None or not is_float32(table):
        return False
    if table is None or table.const_value is None or table.shape is None:
        return False
    return len(table.shape) == 2


def _may_head_group(node: ir.Node) -> bool:
    """Whether an op may be the first of a kernel with quantized inputs."""
    if not is_float32(node.outputs[0]) or not node.inputs:
        return False
    if has_role(node, Role.LAYER):
        return True
    operands = list_kernel_operands(node)
    computed = all(value is not None and value.const_value is None for value in operands)
    return has_role(node, Role.JOINING) and computed and len(list_used_outputs(node)) == 1


def list_kernel_operands(node: ir.Node) -> tuple[ir.Value | None, ...]:
    """Return the inputs of a layer or joining op that its integer kernel reads."""
    return tuple(node.inputs[: get_op_row(node).operands])


class _Kernels(FusionRules[ir.Node, ir.Value]):
    """The epilogues of ONNX Runtime's integer kernels.

    Args:
        rejected: ops that no kernel runs.
    """

    def __init__(self, rejected: Collection[str]) -> None:
        self._rejected = rejected

    def match_bias(self, group: FusionGroup) -> Step | None:
        step = _find_only_reader(group.tail.outputs[0])
        if step is None or get_op_row(group.head).bias is not None:
            return None
        bias = _match_bias(group.head, step)
        return Step(BIAS, (step,), bias) if bias is not None else None

    def match_activation(self, group: FusionGroup) -> Step | None:
        step = _find_only_reader(group.tail.outputs[0])
        if (
            step is None
            or not get_op_row(group.head).fuses_activation
            or get_clamp_limits(step) is None
        ):
            return None
        if step.name in self._rejected:
            return None
        return Step(step.op_type, (step,))


def _find_only_reader(value: ir.Value) -> ir.Node | None:
    if value.is_graph_output() or len(value.uses()) != 1:
        return None
    (use,) = value.uses()
    return use.node if use.node.graph is value.graph and not use.node.domain else None


def _match_bias(product: ir.Node, step: ir.Node) -> ir.Value | None:
    """Return the constant that an addition adds to every row of a product."""
    if step.op_type != "Add":
        return None
    weight, result = product.inputs[1], product.outputs[0]
    for value in step.inputs:
        array = get_constant_array(value)
        if array is None or weight is None or weight.shape is None or len(weight.shape) != 2:
            continue
        columns = array.size == array.shape[-1] == weight.shape[1] if array.ndim else False
        grows = array.ndim > 1 and (result.shape is None or array.ndim > len(result.shape))
        if columns and not grows:
            return value
    return None


def _is_agnostic_op(node: ir.Node, opset: int) -> bool:
    """Whether an op yields the same on quantized as on float values."""
    if not has_role(node, Role.MOVING) or not is_float32(node.outputs[0]):
        return False
    if node.inputs[0] is None or node.inputs[0].const_value is not None:
        return False
    if any(value is not None and value.const_value is None for value in node.inputs[1:]):
        return False
    if len(list_used_outputs(node)) > 1 and not get_op_row(node).moves_several:
        return False
    return moves_bytes(node, opset)
