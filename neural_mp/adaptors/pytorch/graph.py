"""The neutral graph of a prepared module, with the clusters its integer kernels run as one."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.model import OP_NAME, constant, only_user, op_nodes
from neural_mp.adaptors.pytorch.prepare import has_tensors, op_type
from neural_mp.graph import Op, OpGraph

aten = torch.ops.aten

CONVOLUTION = aten.conv2d.default
LINEAR = aten.linear.default
ADD = aten.add.Tensor

#: Activation → (oneDNN's name of it, kernels that take it as a post-op); measured, see
#: tests/adaptors/test_pytorch_kernels.py.
ACTIVATIONS: dict[Any, tuple[str, frozenset[Any]]] = {
    aten.relu.default: ("relu", frozenset({CONVOLUTION, LINEAR})),
    aten.hardtanh.default: ("hardtanh", frozenset({CONVOLUTION, LINEAR})),
    aten.silu.default: ("swish", frozenset({CONVOLUTION, LINEAR})),
    aten.hardswish.default: ("hardswish", frozenset({CONVOLUTION, LINEAR})),
    aten.gelu.default: ("gelu", frozenset({LINEAR})),
    aten.tanh.default: ("tanh", frozenset({LINEAR})),
}
#: Ops that give the same result on quantized values as on real ones: they move or select.
CARRIES_INT8 = frozenset(
    {
        aten.max_pool2d.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.squeeze.dim,
        aten.unsqueeze.default,
    }
)


def build_graph(module: GraphModule) -> OpGraph:
    """Ops, edges and clusters of a prepared module."""
    heads = find_clusters(module)
    inputs = [n.name for n in module.graph.nodes if n.op == "placeholder" and has_tensors(n)]
    ops = [
        Op(
            name,
            op_type(node),
            _sources(node),
            cluster=heads.get(name),
            carries_int8=node.target in CARRIES_INT8,
        )
        for name, node in op_nodes(module).items()
    ]
    output = next(n for n in module.graph.nodes if n.op == "output")
    return OpGraph(ops, inputs, [tensor_name(n) for n in output.all_input_nodes if has_tensors(n)])


def tensor_name(node: Node) -> str:
    """The name of a node's result: the op's name, or that of the graph input."""
    return str(node.meta.get(OP_NAME, node.name))


def _sources(node: Node) -> tuple[str, ...]:
    read = [n for n in node.all_input_nodes if n.op != "get_attr" and has_tensors(n)]
    return tuple(tensor_name(n) for n in read)


def is_head(module: GraphModule, node: Node) -> bool:
    """Whether a node is a layer with a constant weight that has an integer kernel."""
    return (
        node.op == "call_function"
        and node.target in (CONVOLUTION, LINEAR)
        and constant(module, node.args[1]) is not None
        and isinstance(node.args[0], Node)
        and node.args[0].op != "get_attr"
    )


def find_clusters(module: GraphModule) -> dict[str, str]:
    """Op → the layer whose kernel can also do it: residual addition, then activation."""
    heads: dict[str, str] = {}
    layers = [n for n in op_nodes(module).values() if is_head(module, n)]
    # The later of two layers that meet in an addition takes it: the other's result is ready then.
    for layer in reversed(layers):
        head = layer.meta[OP_NAME]
        tail, summed = layer, False
        addition = only_user(tail)
        if (
            addition is not None
            and is_residual(layer, addition)
            and addition.meta[OP_NAME] not in heads
        ):
            heads[addition.meta[OP_NAME]] = head
            tail, summed = addition, True
        activation = only_user(tail)
        if activation is None or activation.target not in ACTIVATIONS:
            continue
        _, kernels = ACTIVATIONS[activation.target]
        if layer.target in kernels and not (summed and activation.target is not aten.relu.default):
            heads[activation.meta[OP_NAME]] = head
    return heads


def is_residual(layer: Node, addition: Node) -> bool:
    """An addition of two different tensors of one shape, behind a convolution."""
    if layer.target is not CONVOLUTION or addition.target is not ADD or addition.kwargs:
        return False
    first, second = addition.args
    if not isinstance(first, Node) or not isinstance(second, Node) or first is second:
        return False
    other = second if first is layer else first
    return other.op != "get_attr" and _shape(other) == _shape(layer)


def _shape(node: Node) -> tuple[str, ...]:
    return tuple(map(str, node.meta["val"].shape))
