"""The portable graphs as calibration runs them: the same numbers but for rounding, in less time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.functional import OUT_OF_PLACE
from neural_mp.adaptors.pytorch.model import (
    TorchModel,
    add_constant,
    arguments,
    constant,
    is_float,
    likely_size,
    shallow_copy,
    sizes_of_result,
)
from neural_mp.adaptors.pytorch.quantizable_ops import ADD, CONVOLUTION, INTEGER_LAYERS, geometry

#: A convolution whose weight is packed; None where torch is built without oneDNN.
_PACKED: Any = (
    torch.ops.mkldnn._convolution_pointwise.default
    if torch.backends.mkldnn.is_available()
    else None
)
#: Op → the op that computes the same, number by number, over its first operand.
_IN_PLACE = {op: in_place for in_place, op in OUT_OF_PLACE.items()}
#: Ops whose result is memory of its own.
_FRESH = INTEGER_LAYERS.union((_PACKED,), _IN_PLACE, OUT_OF_PLACE)


def calibration_form(model: TorchModel) -> TorchModel:
    """A model for one run at a time, whose portable graphs take less time and memory.

    Weights of convolutions are packed once, not in every run, and a result is written over an
    operand that nothing else reads. Whoever looks at a value has to do so before the next op runs.
    """
    parts = {
        path: replace(part, portable=_quick(part.portable)) for path, part in model.parts.items()
    }
    return replace(model, parts=parts)


def _quick(module: GraphModule) -> GraphModule:
    module = shallow_copy(module)
    for node in list(module.graph.nodes):
        if node.target is CONVOLUTION:
            _pack(module, node)
        elif node.target in _IN_PLACE:
            _save_memory(node)
    module.recompile()
    return module


def _pack(module: GraphModule, layer: Node) -> None:
    said = arguments(layer)
    weight, image = constant(module, said["weight"]), said["input"].meta.get("val")
    if weight is None or not is_float(image) or image.ndim != weight.ndim:
        return
    if _PACKED is None or {weight.dtype, image.dtype} != {torch.float32}:
        return
    stride, padding, dilation, groups = geometry(layer)
    order = (padding, stride, dilation, groups)
    likely = [likely_size(size) for size in image.shape]
    packed = torch.ops.mkldnn._reorder_convolution_weight(weight, *order, likely)
    read = add_constant(module, f"{layer.name}_packed", packed, layer)
    layer.target = _PACKED
    layer.args = (said["input"], read, said["bias"], *order, "none", [], "")
    layer.kwargs = {}


def _save_memory(node: Node) -> None:
    if node.target is ADD and not node.kwargs and not _may_overwrite(node.args[0], node):
        node.args = (node.args[1], node.args[0])
    if _may_overwrite(node.args[0], node):
        node.target = _IN_PLACE[node.target]


def _may_overwrite(operand: Any, node: Node) -> bool:
    """Whether a node alone reads an operand, whose memory has room for the node's result."""
    if not isinstance(operand, Node) or operand.target not in _FRESH:
        return False
    alone = len(operand.users) == 1 and node.args.count(operand) == 1
    old, new = operand.meta.get("val"), node.meta.get("val")
    if not alone or not is_float(old) or not is_float(new) or old.dtype != new.dtype:
        return False
    return sizes_of_result(operand) == sizes_of_result(node)
