"""Ops in place of the Python functions that call them, and results written over dead ones.

Both change who calls an op and where its result is stored, never a bit of it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.node import map_arg
from torch.fx.proxy import GraphAppendingTracer

from neural_mp.adaptors.pytorch.graph_edit import constant, sizes_of_result
from neural_mp.adaptors.pytorch.kernel_ops import COMPOSED
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS

aten = torch.ops.aten
onednn = torch.ops.onednn

#: Ops whose result is always memory of its own, which none of their inputs share.
_OWN_RESULT = INTEGER_CONVOLUTIONS | {
    *(onednn.qlinear_pointwise.default, onednn.qlinear_pointwise.binary),
    *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
    *(aten.mean.dim, aten.sum.dim_IntList, aten.amax.default),
    *(aten.sigmoid.default, aten.hardsigmoid.default, aten.tanh.default, aten.gelu.default),
    *(aten.relu.default, aten.hardtanh.default, aten.silu.default, aten.hardswish.default),
}


def inline_kernels(module: GraphModule) -> None:
    """Replace calls of composed kernels by the ops that these call."""
    for node in list(module.graph.nodes):
        if node.target in COMPOSED:
            _inline(module.graph, node)
    module.graph.lint()


def _inline(graph: Graph, node: Node) -> None:
    before, kernel, tracer = node.prev, cast(Any, node.target), GraphAppendingTracer(graph)
    with graph.inserting_before(node):
        result = kernel(*map_arg(node.args, lambda read: Proxy(read, tracer))).node
    first = before.next
    if first.target is aten.to.dtype and _dtype(first.args[0]) is first.args[1]:
        first.replace_all_uses_with(cast(Node, first.args[0]))
        graph.erase_node(first)
    result.meta = dict(node.meta)
    node.replace_all_uses_with(result)
    graph.erase_node(node)


def _dtype(node: Any) -> torch.dtype | None:
    value = node.meta.get("val")
    return value.dtype if isinstance(value, torch.Tensor) else None


def overwrite_dead(module: GraphModule) -> None:
    """Write products, and floats to be quantized, over inputs that no other op reads any more.

    Activations then stay in the cache: a pass over them takes up to half as long.
    """
    order = {node: index for index, node in enumerate(module.graph.nodes)}
    own = {node for node in order if node.target in _OWN_RESULT}
    for node in order:
        place = 0 if node.target is aten.mul.Tensor else 1
        if node.target not in (aten.mul.Tensor, aten.add.Tensor):
            continue
        read: Any = node.args[place]
        if read not in own or not _dies(read, node, order):
            continue
        if place == 0 and _is_alike(node, read):
            node.target = aten.mul_.Tensor
        elif place == 1 and _is_number(module, node.args[0], _dtype(read)):
            node.target, node.kwargs = aten.add.out, {**node.kwargs, "out": read}


def _dies(read: Node, op: Node, order: dict[Node, int]) -> bool:
    """Whether no op but this one needs the memory of a tensor from then on."""
    return all(
        reader is op or (order[reader] < order[op] and reader.target in _OWN_RESULT)
        for reader in read.users
    )


def _is_alike(node: Node, read: Node) -> bool:
    """Whether a result has the shape and dtype of a tensor that its op reads."""
    dtype = _dtype(node)
    same = dtype is not None and dtype is _dtype(read)
    return same and sizes_of_result(node) == sizes_of_result(read)


def _is_number(module: GraphModule, node: Any, dtype: torch.dtype | None) -> bool:
    """Whether a node is a constant of a dtype that takes the shape of any tensor."""
    value = constant(module, node)
    return value is not None and value.ndim == 0 and value.dtype is dtype
