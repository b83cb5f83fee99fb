"""Ops with integer kernels, and quantize-agnostic ops."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.graph.graph_edit import get_arguments, get_constant
from neural_mp.core.int8_accumulation import KernelKind

aten = torch.ops.aten

CONVOLUTION = aten.conv2d.default
#: Convolution → number of spatial axes.
CONVOLUTIONS = {aten.conv1d.default: 1, CONVOLUTION: 2, aten.conv3d.default: 3}
LINEAR = aten.linear.default
#: Layers with integer kernels.
INTEGER_LAYERS = frozenset({*CONVOLUTIONS, LINEAR})
EMBEDDING = aten.embedding.default
#: Layers whose weight can be quantized.
WEIGHTED = INTEGER_LAYERS | {EMBEDDING}
ADD = aten.add.Tensor
CONCATENATION = aten.cat.default
PADDING = aten.constant_pad_nd.default
MAX_POOLING = aten.max_pool2d.default

#: Ops that only move or select values, so integers give the result of floats.
_AGNOSTIC = frozenset(
    {
        CONCATENATION,
        PADDING,
        MAX_POOLING,
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


def quantize_agnostic(node: Node) -> bool:
    """Whether a node moves or selects values, so integers can pass through."""
    if node.target not in _AGNOSTIC:
        return False
    if node.target is CONCATENATION:
        return all(is_computed(part) for part in node.args[0])
    if node.target is PADDING and get_arguments(node)["value"] != 0:
        return False  # only zero is exact in every scale
    return is_computed(node.args[0])


def is_computed(value: object) -> bool:
    """Whether an argument is the result of another node, not a constant."""
    return isinstance(value, Node) and value.op != "get_attr"


def has_integer_kernel(module: GraphModule, node: Node) -> bool:
    """Whether a node is a layer with an integer kernel and a constant weight."""
    return (
        node.op == "call_function"
        and node.target in INTEGER_LAYERS
        and get_constant(module, node.args[1]) is not None
        and is_computed(node.args[0])
    )


def convolution_geometry(layer: Node) -> tuple[list[int], list[int], list[int], int]:
    """Return stride, padding, dilation and groups of a convolution."""
    args, axes = get_arguments(layer), CONVOLUTIONS[layer.target]
    stride, padding, dilation = (
        expand_per_axis(args[name], axes) for name in ("stride", "padding", "dilation")
    )
    return stride, padding, dilation, int(args["groups"])


def expand_per_axis(value: object, axes: int) -> list[Any]:
    """Return one value per axis, from a single value or a sequence."""
    values = list(value) if isinstance(value, list | tuple) else [value]
    return values * axes if len(values) == 1 else values


def get_kernel_kind(layer: Node) -> KernelKind:
    """Return the kind of integer kernel that a layer runs in."""
    if layer.target not in CONVOLUTIONS:
        return KernelKind.DENSE
    # One input and one output channel per group; oneDNN has no 3-D kernel of this kind.
    weight, groups = layer.args[1].meta["val"], convolution_geometry(layer)[3]
    single = weight.shape[0] == groups and weight.shape[1] == 1 and weight.ndim < 5
    return KernelKind.DEPTHWISE if single and groups > 1 else KernelKind.CONVOLUTION
