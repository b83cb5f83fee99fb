"""Weights and biases of layers, for scaling per channel."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.weights.cross_layer_scaling import Array, LayerParams, LayerRescale
from neural_mp.adaptors.common.weights.layer_windows import Window
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.graph.quantizable_ops import (
    CONVOLUTIONS,
    geometry,
    has_integer_kernel,
)
from neural_mp.adaptors.pytorch.kernels.lowering import rewritten
from neural_mp.util.pytree import as_numpy

_LAYER_NORM = torch.ops.aten.layer_norm.default


def layer_params(model: TorchModel) -> dict[str, LayerParams]:
    """Return op → its weight and bias."""
    return {
        name: layer
        for part in model.parts.values()
        for name, node in fx.op_nodes(part.portable).items()
        if (layer := _layer_params(part.portable, name, node)) is not None
    }


def _layer_params(module: GraphModule, name: str, node: Node) -> LayerParams | None:
    has_kernel = has_integer_kernel(module, node)
    if not has_kernel and node.target is not _LAYER_NORM:
        return None
    args = fx.arguments(node)
    weight = fx.constant(module, args["weight"])
    if weight is None or (args["bias"] is not None and fx.constant(module, args["bias"]) is None):
        return None

    def read_weight() -> Array:
        return as_numpy(weight)

    if has_kernel:
        axes = CONVOLUTIONS.get(node.target, 0)
        if not axes:
            return LayerParams(name, read_weight, 0, 1)
        stride, padding, dilation, groups = geometry(node)
        window = Window(tuple(stride), tuple(dilation), tuple((pad, pad) for pad in padding))
        # Pooling is assumed over two axes; a 1-D convolution leaves the first unpooled.
        return LayerParams(name, read_weight, 0, 1, groups, -1 - axes, axes > 1, window)
    return LayerParams(name, read_weight) if len(args["normalized_shape"]) == 1 else None


def with_layer_params(model: TorchModel, changes: Mapping[str, LayerRescale]) -> TorchModel:
    """Return the model with changed weights and biases in some layers."""

    def rescale_layers(module: GraphModule) -> None:
        for name, node in fx.op_nodes(module).items():
            if name in changes:
                _rescale_layer(module, name, node, changes[name])

    return rewritten(model, rescale_layers)


def _rescale_layer(module: GraphModule, name: str, node: Node, change: LayerRescale) -> None:
    layer, bias = _layer_params(module, name, node), fx.constant(module, fx.arguments(node)["bias"])
    assert layer is not None
    fx.put_constant(module, node, "weight", change.weight(layer))
    if bias is not None or change.shift is not None:
        channels = np.shape(layer.weight())[layer.outputs]
        values = change.bias(None if bias is None else as_numpy(bias), channels)
        fx.put_constant(module, node, "bias", values)
