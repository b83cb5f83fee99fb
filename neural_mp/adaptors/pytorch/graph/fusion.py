"""Ops that the integer kernel of a layer runs, matched before and after conversion."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.kernels.fusion import (
    SUM,
    FusionGroup,
    FusionRules,
    Step,
    find_fusion_groups,
    map_fused_ops,
)
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS, convolution_takes_activations

aten = torch.ops.aten
onednn = torch.ops.onednn

Group = FusionGroup[Node, Node]
_RELU = aten.relu.default
#: Activation → (oneDNN's name, kernels that take it as a post-op), measured in
#: tests/adaptors/pytorch/test_pytorch_kernels.py.
ACTIVATIONS: dict[Any, tuple[str, frozenset[Any]]] = {
    _RELU: ("relu", frozenset({aten.conv1d.default, layers.CONVOLUTION, layers.LINEAR})),
    aten.hardtanh.default: ("hardtanh", frozenset({layers.CONVOLUTION, layers.LINEAR})),
    aten.silu.default: ("swish", frozenset({layers.CONVOLUTION, layers.LINEAR})),
    aten.hardswish.default: ("hardswish", frozenset({layers.CONVOLUTION, layers.LINEAR})),
    aten.gelu.default: ("gelu", frozenset({layers.LINEAR})),
    aten.tanh.default: ("tanh", frozenset({layers.LINEAR})),
}
#: Kernels whose result is channels-last memory of its own, as a summing kernel overwrites it.
OVERWRITABLE = INTEGER_CONVOLUTIONS | {onednn.qconv2d_pointwise.binary}


def find_only_user(node: Node) -> Node | None:
    """Return the only node that reads a node's result; None if none or several do."""
    return next(iter(node.users)) if len(node.users) == 1 else None


def is_node(value: object, *targets: object) -> bool:
    """Whether a value is a call of one of `targets`."""
    return isinstance(value, Node) and value.target in targets


def match_activation(group: Group) -> Step[Node, Node] | None:
    """Match an activation that a kernel has as a post-op."""
    activation = find_only_user(group.tail)
    if activation is None or activation.target not in ACTIVATIONS:
        return None
    name, heads = ACTIVATIONS[activation.target]
    return Step(name, (activation,)) if group.head.target in heads else None


class _FloatLayers(FusionRules[Node, Node]):
    """Fusion rules of oneDNN's integer kernels for a layer still in float."""

    #: Layers whose kernels may also sum.
    summing: tuple[Any, ...] = (layers.CONVOLUTION,)

    def match_residual_sum(self, group: Group) -> Step[Node, Node] | None:
        """Match a sum of two different computed tensors of equal shape."""
        addition = find_only_user(group.tail)
        if group.head.target not in self.summing or addition is None:
            return None
        if addition.target is not layers.ADD or addition.kwargs:
            return None
        first, second = addition.args
        if not layers.is_computed(first) or not layers.is_computed(second) or first is second:
            return None
        if fx.sizes_of_result(first) != fx.sizes_of_result(second):
            return None
        return Step(SUM, (addition,), second if first is group.tail else first)

    def match_activation(self, group: Group) -> Step[Node, Node] | None:
        """Match an activation that the kernel has as a post-op; after a sum, ReLU only."""
        step = match_activation(group)
        if step is None or (group.residual_sum is not None and step.ops[0].target is not _RELU):
            return None
        axes = layers.CONVOLUTIONS.get(group.head.target)
        return step if axes is None or convolution_takes_activations(axes) else None


class _IntegerLayers(_FloatLayers):
    """Fusion rules of oneDNN's integer kernels for a layer with quantized inputs."""

    summing = (layers.CONVOLUTION, layers.LINEAR)

    def match_residual_sum(self, group: Group) -> Step[Node, Node] | None:
        """Match an in-place sum of a convolution, or any float32 sum of a dense layer.

        In-place sums require that term and result are both uint8, or that both are float32 and the
        term has no other reader.
        """
        step = super().match_residual_sum(group)
        if step is None or step.operand is None:
            return None
        if step.operand.meta["val"].dtype is not torch.float32:
            return None
        if group.head.target is layers.LINEAR:
            supported = is_node(group.head.args[0], ops.dequantize)
        else:
            last = self.match_activation(Group(group.head, (step,))) or step
            stored = find_quantizer(last.ops[-1]) is not None
            quantized = is_node(step.operand, ops.dequantize)
            supported = quantized if stored else _is_own_float(step.operand)
        return step if supported else None


def map_fused_layers(module: GraphModule) -> dict[str, str]:
    """Return op → layer whose integer kernel can run it: residual sum, then activation."""
    nodes = [
        node for node in fx.map_op_nodes(module).values() if layers.has_integer_kernel(module, node)
    ]
    heads = map_fused_ops(find_fusion_groups(nodes, _FloatLayers()).values())
    return {op.meta[fx.OP_NAME]: head.meta[fx.OP_NAME] for op, head in heads.items()}


def post_op_of(activation: Step[Node, Node] | None) -> tuple[str, list[float], str]:
    """Return oneDNN's name of an activation, its scalars and its algorithm."""
    if activation is None:
        return "none", [], ""
    args = fx.get_arguments(activation.ops[0])
    bounds = [float(args[name]) for name in ("min_val", "max_val") if name in args]
    return activation.kind, bounds, str(args.get("approximate", ""))


def match_group(layer: Node) -> Group:
    """Return the group of ops that the kernel of a layer with quantized inputs runs."""
    return find_fusion_groups([layer], _IntegerLayers())[layer]


def find_quantizer(tail: Node) -> Node | None:
    """Return the quantize op that is the only reader of a node's result."""
    user = find_only_user(tail)
    return user if is_node(user, ops.quantize) else None


def _is_own_float(summand: Node) -> bool:
    """Whether a float term is fresh channels-last memory that only the addition reads."""
    readers = [user for user in summand.users if not _reads_integers(user, summand)]
    if len(readers) > 1:
        return False
    if is_node(summand, ops.dequantize):
        return summand.args[0].target in OVERWRITABLE and summand.args[3] is torch.float32
    return summand.target in OVERWRITABLE


def _reads_integers(layer: Node, source: Node) -> bool:
    """Whether a layer will read `source` before dequantization, as integers."""
    return (
        layer.target in layers.INTEGER_LAYERS
        and layer.args[0] is source
        and is_node(source, ops.dequantize)
        and is_node(layer.args[1], ops.dequantize_weight)
    )
