"""The constants of layers, to be scaled channel by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.common.channel_scaling import Array, Layer, LayerChange
from neural_mp.adaptors.pytorch.graph import CONVOLUTIONS, is_head
from neural_mp.adaptors.pytorch.integer_kernels import geometry
from neural_mp.adaptors.pytorch.model import (
    Part,
    TorchModel,
    add_constant,
    constant,
    finish,
    op_nodes,
    shallow_copy,
)

aten = torch.ops.aten

_LAYER_NORM = aten.layer_norm.default
#: Layer → which of its arguments are the weight and the bias.
_CONSTANTS = {_LAYER_NORM: (2, 3)}
_LAYER_CONSTANTS = (1, 2)


def layers(model: TorchModel) -> dict[str, Layer]:
    """Op → its constants."""
    found = {}
    for part in model.parts.values():
        for name, node in op_nodes(part.portable).items():
            layer = _layer(part.portable, name, node)
            if layer is not None:
                found[name] = layer
    return found


def _layer(module: GraphModule, name: str, node: Node) -> Layer | None:
    position, bias_position = _CONSTANTS.get(node.target, _LAYER_CONSTANTS)

    def weight() -> Array:
        value = constant(module, node.args[position])
        assert value is not None
        return _array(value)

    bias = node.args[bias_position] if len(node.args) > bias_position else None
    if node.kwargs or (bias is not None and constant(module, bias) is None):
        return None
    if is_head(module, node):
        axes = CONVOLUTIONS.get(node.target, 0)
        groups = geometry(node)[3] if axes else 1
        # Pooling is over two axes here, of which a convolution over one leaves the first.
        return Layer(name, weight, 0, 1, groups, axis=-1 - axes, pooled=axes > 1)
    last_axis_only = node.target is _LAYER_NORM and len(node.args[1]) == 1
    if last_axis_only and len(node.args) > 2 and constant(module, node.args[2]) is not None:
        return Layer(name, weight)
    return None


def _array(value: torch.Tensor) -> Array:
    """As an array, of float32 what numpy has no numbers for."""
    return np.asarray((value.float() if value.dtype is torch.bfloat16 else value).numpy())


def with_layers(model: TorchModel, changes: Mapping[str, LayerChange]) -> TorchModel:
    """The model with other constants in some of its layers."""
    parts = {}
    for path, part in model.parts.items():
        portable = shallow_copy(part.portable)
        for name, node in op_nodes(portable).items():
            if name in changes:
                _change(portable, name, node, changes[name])
        finish(portable)
        parts[path] = Part(portable, portable, part.example)
    return replace(model, parts=parts, original=None)


def _change(module: GraphModule, name: str, node: Node, change: LayerChange) -> None:
    layer = _layer(module, name, node)
    assert layer is not None
    position, bias_position = _CONSTANTS.get(node.target, _LAYER_CONSTANTS)
    before = constant(module, node.args[position])
    assert before is not None
    weight = torch.from_numpy(change.weight(layer)).to(before.dtype)
    source = node.args[bias_position] if len(node.args) > bias_position else None
    bias = constant(module, source)
    new = [add_constant(module, f"{node.name}_repaired_weight", weight, node)]
    if bias is not None or change.shift is not None:
        channels = weight.shape[layer.outputs]
        values = change.bias(None if bias is None else _array(bias), channels)
        stored = torch.from_numpy(values).to(weight.dtype)
        new.append(add_constant(module, f"{node.name}_repaired_bias", stored, node))
    node.args = (*node.args[:position], *new, *node.args[position + len(new) :])
