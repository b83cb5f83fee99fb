"""Converted models whose weights use more of int8 than saturating products leave right."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch import quantize_ops as ops
from neural_mp.adaptors.pytorch.capabilities import kernel_of
from neural_mp.adaptors.pytorch.fusion import is_node
from neural_mp.adaptors.pytorch.graph import INTEGER_LAYERS, WEIGHT_ARGUMENT
from neural_mp.adaptors.pytorch.integer_kernels import runnable_form
from neural_mp.adaptors.pytorch.model import (
    Part,
    TorchModel,
    add_constant,
    attribute,
    finish,
    shallow_copy,
)
from neural_mp.core.byte_products import (
    EXACT_EVERYWHERE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    KernelKind,
)

_LIMIT = WEIGHT_LIMITS[REDUCED_RANGE]


def wide_kernels(model: TorchModel) -> frozenset[KernelKind]:
    """The kinds of the integer kernels that have a weight beyond ±63."""
    parts = model.parts.values()
    return frozenset(kernel_of(layer) for part in parts for layer in _wide_layers(part.portable))


def with_reduced_weights(model: TorchModel) -> TorchModel:
    """The model with weights rounded once more, to ±63, where a kernel may saturate."""
    parts = {path: _reduced(part) for path, part in model.parts.items()}
    return replace(model, parts=parts)


def _reduced(part: Part) -> Part:
    module = shallow_copy(part.portable)
    for layer in list(_wide_layers(module)):
        if kernel_of(layer) in EXACT_EVERYWHERE:
            continue
        pair = layer.args[WEIGHT_ARGUMENT[layer.target]]
        integers, scales = (attribute(module, str(node.target)) for node in pair.args)
        rounded = ops.quantize_weight(ops.dequantize_weight(integers, scales), _LIMIT)
        arguments = tuple(
            add_constant(module, f"{layer.name}_weight_{word}", value, pair)
            for word, value in zip(("int8", "scales"), rounded, strict=True)
        )
        with module.graph.inserting_before(pair):
            reduced = module.graph.call_function(ops.dequantize_weight, arguments)
        reduced.meta = dict(pair.meta)
        layer.replace_input_with(pair, reduced)
    return Part(finish(module), runnable_form(module), part.example)


def _wide_layers(module: GraphModule) -> Iterator[Node]:
    """The layers that multiply bytes by a weight beyond ±63; of weights alone there are none."""
    for node in module.graph.nodes:
        if node.target not in INTEGER_LAYERS:
            continue
        source, weight = node.args[0], node.args[WEIGHT_ARGUMENT[node.target]]
        multiplied = is_node(source, ops.dequantize) or is_node(source, ops.dequantize_dynamic)
        if multiplied and is_node(weight, ops.dequantize_weight):
            integers = attribute(module, str(weight.args[0].target))
            if bool((integers.to(torch.int16).abs() > _LIMIT).any()):
                yield node
