"""The neutral graph of a prepared module, with the fusion groups its integer kernels run as one."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.model import (
    INPUT_NAME,
    OP_NAME,
    constant,
    has_tensors,
    only_user,
    op_nodes,
    op_type,
)
from neural_mp.core.graph import Op, OpGraph

aten = torch.ops.aten

CONVOLUTION = aten.conv2d.default
#: Convolution → how many axes its images have.
CONVOLUTIONS = {aten.conv1d.default: 1, CONVOLUTION: 2, aten.conv3d.default: 3}
LINEAR = aten.linear.default
#: Layers that integer kernels exist for.
INTEGER_LAYERS = frozenset({*CONVOLUTIONS, LINEAR})
EMBEDDING = aten.embedding.default
ADD = aten.add.Tensor
CONCATENATION = aten.cat.default
PADDING = aten.constant_pad_nd.default
#: Layer → which of its arguments is the weight.
WEIGHT_ARGUMENT = {**dict.fromkeys(CONVOLUTIONS, 1), LINEAR: 1, EMBEDDING: 0}

#: Activation → (oneDNN's name of it, kernels that take it as a post-op); measured, see
#: tests/adaptors/test_pytorch_kernels.py.
ACTIVATIONS: dict[Any, tuple[str, frozenset[Any]]] = {
    aten.relu.default: ("relu", frozenset({aten.conv1d.default, CONVOLUTION, LINEAR})),
    aten.hardtanh.default: ("hardtanh", frozenset({CONVOLUTION, LINEAR})),
    aten.silu.default: ("swish", frozenset({CONVOLUTION, LINEAR})),
    aten.hardswish.default: ("hardswish", frozenset({CONVOLUTION, LINEAR})),
    aten.gelu.default: ("gelu", frozenset({LINEAR})),
    aten.tanh.default: ("tanh", frozenset({LINEAR})),
}
#: Ops that give the same result on quantized values as on real ones: they move or select.
_AGNOSTIC = frozenset(
    {
        CONCATENATION,
        PADDING,
        aten.max_pool2d.default,
        aten.upsample_nearest2d.vec,
        aten.pixel_shuffle.default,
        aten.reshape.default,
        aten.permute.default,
        aten.transpose.int,
        aten.slice.Tensor,
        aten.select.int,
        aten.expand.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.unsqueeze.default,
    }
)


def build_graph(modules: Iterable[GraphModule]) -> OpGraph:
    """Ops, edges and fusion groups of prepared modules, side by side."""
    ops: list[Op] = []
    inputs: list[str] = []
    outputs: list[str] = []
    for module in modules:
        heads = find_fusion_groups(module)
        for name, node in op_nodes(module).items():
            fusion_group, carries = heads.get(name), quantize_agnostic(node)
            ops.append(Op(name, op_type(node), _sources(node), fusion_group, carries))
        for node in module.graph.nodes:
            if node.op == "placeholder" and has_tensors(node):
                inputs.append(tensor_name(node))
            elif node.op == "output":
                outputs += _sources(node)
    return OpGraph(ops, inputs, outputs)


def tensor_name(node: Node) -> str:
    """The name of a node's result: the op's name, or that of the graph input."""
    return str(node.meta.get(OP_NAME) or node.meta.get(INPUT_NAME, node.name))


def _sources(node: Node) -> tuple[str, ...]:
    """The ops and graph inputs that a node reads; of a converted graph, past its conversions."""
    found: dict[str, None] = {}
    for source in node.all_input_nodes:
        if source.op == "get_attr" or not has_tensors(source):
            continue
        if source.op == "placeholder" or OP_NAME in source.meta:
            found[tensor_name(source)] = None
        else:
            found.update(dict.fromkeys(_sources(source)))
    return tuple(found)


def quantize_agnostic(node: Node) -> bool:
    """Whether a node gives the same result on quantized values as on real ones."""
    if node.target not in _AGNOSTIC:
        return False
    if node.target is CONCATENATION:
        return all(_is_computed(part) for part in node.args[0])
    if node.target is PADDING and len(node.args) > 2 and node.args[2] != 0:
        return False  # zero is the one value that every scale holds
    return _is_computed(node.args[0])


def _is_computed(value: Any) -> bool:
    return isinstance(value, Node) and value.op != "get_attr"


def is_head(module: GraphModule, node: Node) -> bool:
    """Whether a node is a layer with a constant weight that has an integer kernel."""
    return (
        node.op == "call_function"
        and node.target in INTEGER_LAYERS
        and constant(module, node.args[1]) is not None
        and _is_computed(node.args[0])
    )


def find_fusion_groups(module: GraphModule) -> dict[str, str]:
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
    """An addition whose kernel can sum in integers: behind a convolution over images."""
    return layer.target is CONVOLUTION and is_addition(layer, addition)


def is_addition(layer: Node, addition: Node) -> bool:
    """An addition of two different computed tensors of one shape, behind such a layer."""
    if layer.target not in (CONVOLUTION, LINEAR) or addition.target is not ADD or addition.kwargs:
        return False
    first, second = addition.args
    if not _is_computed(first) or not _is_computed(second) or first is second:
        return False
    return _shape(first) == _shape(second)


def _shape(node: Node) -> tuple[str, ...]:
    return tuple(map(str, node.meta["val"].shape))
