"""Convolutions of single pixels, as in squeeze-and-excitation, run as products.

A convolution has costs of its own: on an image of one pixel, they exceed those of the product.
"""

from __future__ import annotations

from typing import cast

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import kernel_ops as kernels
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers

_ONE_PIXEL = (1, 1)


def call_pixel_products(module: GraphModule) -> None:
    """Call products instead of FP32 convolutions whose images have one pixel each.

    Results are those of the convolutions up to FP32 rounding.
    """
    for node in list(module.graph.nodes):
        if _is_pixel_product(module, node):
            _call_product(module, node)
    module.graph.eliminate_dead_code()


def _is_pixel_product(module: GraphModule, node: Node) -> bool:
    """Whether a node is an FP32 convolution of one pixel per image with all inputs."""
    if node.op != "call_function" or node.target is not layers.CONVOLUTION:
        return False
    weight, image = fx.constant(module, node.args[1]), cast(Node, node.args[0]).meta.get("val")
    if weight is None or not isinstance(image, torch.Tensor) or image.ndim != 4:
        return False
    _, padding, _, groups = layers.geometry(node)
    return (
        weight.dtype is image.dtype is torch.float32
        and fx.expressions(image.shape[2:]) == weight.shape[2:] == _ONE_PIXEL
        and not any(padding)
        and groups == 1
    )


def _call_product(module: GraphModule, layer: Node) -> None:
    weight = fx.constant(module, layer.args[1])
    assert weight is not None
    outputs, inputs = weight.shape[:2]
    transposed = fx.add_constant(module, f"{layer.name}_turned", weight.flatten(1).t(), layer)
    layer.args = (layer.args[0], transposed, fx.arguments(layer)["bias"], inputs, outputs)
    layer.kwargs = {}
    layer.target = kernels.pixel_product
