"""Integer convolutions that set up their kernel once instead of in every call.

`onednn.qconv_pointwise` describes and looks up its kernel in every call, which takes longer than
many a kernel. Convolutions of quantized tensors run the same kernels, with the same results.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch import graph_edit as fx
from neural_mp.adaptors.pytorch import kernel_ops as kernels
from neural_mp.adaptors.pytorch import qdq_ops as ops
from neural_mp.adaptors.pytorch.quantized_tensors import (
    as_uint8,
    has_quantized_tensors,
    packed_convolution,
)
from neural_mp.adaptors.pytorch.versions import integer_convolution

aten = torch.ops.aten
quantized = torch.ops.quantized

_ALONE, _SUMMING = integer_convolution(2), torch.ops.onednn.qconv2d_pointwise.binary
#: Activation → convolutions of quantized tensors, alone and with a sum.
_CONVOLUTIONS = {
    "none": (quantized.conv2d.new, quantized.conv2d_add.default),
    "relu": (quantized.conv2d_relu.new, quantized.conv2d_add_relu.default),
}
#: Ops on integers → the same on quantized tensors, which keeps scale and zero point.
_CARRIERS = {
    aten.clone.default: aten.clone.default,
    kernels.max_pool2d_uint8: aten.max_pool2d.default,
}


def call_cached_convolutions(module: GraphModule) -> bool:
    """Call convolutions of quantized tensors where most of their neighbours are such, too.

    Returns whether the graph then needs the engine of `quantized_tensors.with_engine`.
    """
    if not has_quantized_tensors():
        return False
    found: dict[Node, set[Node]] = {}
    for node in module.graph.nodes:
        if _may_be_quantized(node, found):
            group = {node}.union(*(found[s] for s in _integers(node) if s in found))
            found.update(dict.fromkeys(group, group))
    chosen = {node for node, group in found.items() if _pays(group)}
    replaced: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        if node in chosen:
            with module.graph.inserting_before(node):
                replaced[node] = _quantized(module, node, replaced)
    for node, result in reversed(replaced.items()):
        if any(user not in chosen for user in node.users):
            with module.graph.inserting_before(node):
                node.replace_all_uses_with(module.graph.call_function(as_uint8, (result,)))
        module.graph.erase_node(node)
    return any(node.target is _SUMMING for node in chosen)


def _may_be_quantized(node: Node, found: Iterable[Node]) -> bool:
    if node.target in _CARRIERS:
        return node.args[0] in found
    if node.target is ops.quantize_uint8:
        return True
    if node.target not in (_ALONE, _SUMMING) or fx.INTEGER_WEIGHT not in node.meta:
        return False
    args = fx.arguments(node)
    activation = args["attr" if node.target is _ALONE else "unary_attr"]
    is_plane = node.meta[fx.INTEGER_WEIGHT].ndim == 4
    return is_plane and activation in _CONVOLUTIONS and args["output_dtype"] is torch.uint8


def _integers(node: Node) -> Iterator[Any]:
    """Yield the integers that a node reads."""
    if node.target is not ops.quantize_uint8:
        yield node.args[0]
    if node.target is _SUMMING:
        yield fx.arguments(node)["qaccum"]


def _pays(group: set[Node]) -> bool:
    """Whether more convolutions get faster than tensors need another form at the borders.

    Quantization is as fast in either form.
    """
    convolutions = sum(node.target in (_ALONE, _SUMMING) for node in group)
    entries = sum(source not in group for node in group for source in _integers(node))
    results = (node for node in group if node.target is not ops.quantize_uint8)
    exits = sum(any(user not in group for user in node.users) for node in results)
    return convolutions > entries + exits


def _quantized(module: GraphModule, node: Node, replaced: dict[Node, Node]) -> Node:
    """Return what computes a node's result as a quantized tensor."""
    graph = module.graph
    if node.target is ops.quantize_uint8:
        x, scale, zero_point = node.args
        converted = graph.call_function(aten.to.dtype, (x, torch.float32))
        values = (converted, scale, zero_point, torch.quint8)
        return graph.call_function(aten.quantize_per_tensor.default, values)
    if node.target in _CARRIERS:
        values = (replaced[node.args[0]], *node.args[1:])
        return graph.call_function(_CARRIERS[node.target], values, node.kwargs)
    args = fx.arguments(node)

    def operand(word: str, scale: str, zero_point: str) -> Node:
        values = args[word], args[scale], args[zero_point]
        made = aten._make_per_tensor_quantized_tensor.default
        return replaced.get(args[word]) or graph.call_function(made, values)

    name = f"{node.name}_cached"
    # Not a tensor, so no buffer; and a graph warns of attributes that are neither.
    setattr(module, name, _packed(module, node))
    packed = graph.create_node("get_attr", name)
    operands = [operand("qx", "x_scale", "x_zero_point")]
    if node.target is _SUMMING:
        operands.append(operand("qaccum", "accum_scale", "accum_zero_point"))
    activation = args["attr" if node.target is _ALONE else "unary_attr"]
    kernel = _CONVOLUTIONS[activation][len(operands) - 1]
    output = args["output_scale"], args["output_zero_point"]
    return graph.call_function(kernel, (*operands, packed, *output))


def _packed(module: GraphModule, node: Node) -> Any:
    args = fx.arguments(node)
    geometry = tuple(args[word] for word in ("stride", "padding", "dilation", "groups"))
    scales, bias = (fx.constant(module, args[word]) for word in ("w_scale", "bias"))
    assert scales is not None
    return packed_convolution(node.meta[fx.INTEGER_WEIGHT], scales, bias, geometry)
