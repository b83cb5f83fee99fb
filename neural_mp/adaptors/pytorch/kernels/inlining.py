"""Ops in place of the Python functions that call them, and results written over dead ones.

Both change who calls an op and where its result is stored, never a bit of it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from neural_mp.adaptors.pytorch.capture.functionalize import OUT_OF_PLACE
from neural_mp.adaptors.pytorch.graph.graph_edit import constant, sizes_of_result
from neural_mp.adaptors.pytorch.graph.kernel_ops import COMPOSED, pixel_product
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS

aten = torch.ops.aten
onednn = torch.ops.onednn

#: Op of a number and a tensor → its variant that writes the result to a tensor.
_WITH_OUTPUT = {aten.add.Tensor: aten.add.out, aten.addcmul.default: aten.addcmul.out}

#: Activation → in-place equivalent.
_IN_PLACE = {
    op: in_place for in_place, op in OUT_OF_PLACE.items() if in_place._overloadname == "default"
}
#: Ops whose result is always memory of its own, which none of their inputs share.
_OWN_RESULT = INTEGER_CONVOLUTIONS.union(_IN_PLACE) | {
    onednn.qlinear_pointwise.default,
    onednn.qlinear_pointwise.binary,
    aten.add.Tensor,
    aten.sub.Tensor,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.gelu.default,
    aten.mean.dim,
    aten.sum.dim_IntList,
    aten.amax.default,
    aten.addmm.default,
    aten.mm.default,
}


def inline_kernels(module: GraphModule) -> None:
    """Replace calls of composed kernels by the ops that these call."""
    images: set[Node] = set()
    for node in list(module.graph.nodes):
        if node.target is pixel_product:
            images.add(_inline(module.graph, node))
        elif node.target in COMPOSED:
            _inline(module.graph, node)
    _drop_views(module.graph, images)
    module.graph.lint()


def _drop_views(graph: Graph, images: set[Node]) -> None:
    """Run activations between products on rows, and drop the views as images and back.

    Args:
        graph: a graph with inlined kernels.
        images: views of rows [batch, channels] as images [batch, channels, 1, 1].
    """
    for node in list(graph.nodes):
        source: Any = node.args[0] if node.args else None
        if not isinstance(source, Node) or source not in images:
            continue
        if node.target is aten.reshape.default and node.args[1] == source.args[1][:2]:
            node.replace_all_uses_with(source.args[0])
            graph.erase_node(node)
        elif node.target in _IN_PLACE:
            with graph.inserting_before(node):
                rows = graph.call_function(
                    node.target, (source.args[0], *node.args[1:]), node.kwargs
                )
                image = graph.call_function(source.target, (rows, source.args[1]))
            image.meta = dict(node.meta)
            node.replace_all_uses_with(image)
            graph.erase_node(node)
            images.add(image)
    for node in reversed(graph.nodes):
        if node in images and not node.users:
            graph.erase_node(node)


def _inline(graph: Graph, node: Node) -> Node:
    previous, kernel, tracer = node.prev, cast(Any, node.target), GraphAppendingTracer(graph)
    with graph.inserting_before(node):
        result = kernel(*map_arg(node.args, lambda operand: Proxy(operand, tracer))).node
    first = previous.next
    if first.target is aten.to.dtype and _dtype(first.args[0]) is first.args[1]:
        first.replace_all_uses_with(cast(Node, first.args[0]))
        graph.erase_node(first)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)
    return cast(Node, result)


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def overwrite_dead(module: GraphModule) -> None:
    """Write activations, products and floats to be quantized over inputs that no op reads later.

    These then stay in the cache: a pass over them takes up to half as long.
    """
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    own = {node for node in order if node.target in _OWN_RESULT}
    for node in order:
        position = 1 if node.target in _WITH_OUTPUT else 0
        if node.target is not aten.mul.Tensor and node.target not in {**_WITH_OUTPUT, **_IN_PLACE}:
            continue
        operand: Any = node.args[position]
        if operand not in own or not _dies(operand, node, order):
            continue
        if node.target in _IN_PLACE:
            node.target = _IN_PLACE[node.target]
        elif position == 0 and _is_alike(node, operand):
            node.target = aten.mul_.Tensor
        elif (
            position == 1
            and _is_number(module, node.args[0], _dtype(operand))
            and all(_takes_shape(factor, operand) for factor in node.args[2:])
        ):
            node.target, node.kwargs = _WITH_OUTPUT[node.target], {**node.kwargs, "out": operand}


def _dies(operand: Node, op: Node, order: dict[Node, int]) -> bool:
    """Whether no op but this one needs the memory of a tensor from then on."""
    return all(
        reader is op or (order[reader] < order[op] and reader.target in _OWN_RESULT)
        for reader in operand.users
    )


def _is_alike(node: Node, operand: Node) -> bool:
    """Whether a result has the shape and dtype of a tensor that its op reads."""
    dtype = _dtype(node)
    same = dtype is not None and dtype is _dtype(operand)
    return same and sizes_of_result(node) == sizes_of_result(operand)


def _takes_shape(factor: Any, operand: Node) -> bool:
    """Whether a product of a tensor and a factor has the shape and dtype of the tensor."""
    if not isinstance(factor, Node) or None in (_dtype(factor), _dtype(operand)):
        return False
    sizes, whole = sizes_of_result(factor), sizes_of_result(operand)
    same = _dtype(factor) is _dtype(operand) and len(sizes) == len(whole)
    return same and all(size in (1, full) for size, full in zip(sizes, whole, strict=True))


def _is_number(module: GraphModule, node: Any, dtype: torch.dtype | None) -> bool:
    """Whether a node is a constant of a dtype that takes the shape of any tensor."""
    value = constant(module, node)
    return value is not None and value.ndim == 0 and value.dtype is dtype
