"""From quantize/dequantize pairs to oneDNN's integer kernels, run eagerly, no compiler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch import ops
from neural_mp.adaptors.pytorch.casts import cast_dtype
from neural_mp.adaptors.pytorch.graph import (
    ACTIVATIONS,
    CARRIES_INT8,
    CONVOLUTION,
    LINEAR,
    is_residual,
)
from neural_mp.adaptors.pytorch.model import (
    CONVERTED,
    OP_NAME,
    attribute,
    finish,
    only_user,
    shallow_copy,
)

aten = torch.ops.aten
onednn = torch.ops.onednn

#: Float dtypes the kernels can write directly.
_FLOAT_OUTPUTS = {
    CONVOLUTION: (torch.float32, torch.bfloat16),
    LINEAR: (torch.float32, torch.bfloat16, torch.float16),
}
#: Kernels whose result is memory of their own, channels last, as a summing kernel overwrites it.
_OVERWRITABLE = (onednn.qconv_pointwise.default, onednn.qconv2d_pointwise.binary)


def max_pool2d_uint8(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Max pooling of uint8 values.

    By way of int16: torch has no channels-last max pooling for uint8.
    """
    return aten.max_pool2d.default(x.to(torch.int16), *arguments).to(torch.uint8)


@dataclass(frozen=True)
class _Kernel:
    """A layer and what its kernel does with it.

    Attributes:
        layer: the convolution or dense layer.
        tail: the last op it takes in.
        addition: the residual addition; None without one.
        summand: the other term of the addition, dequantized.
        activation: the activation's node; None without one.
        output: the quantize op behind it; None where the result is a float.
    """

    layer: Node
    tail: Node
    addition: Node | None = None
    summand: Node | None = None
    activation: Node | None = None
    output: Node | None = None


def runnable_form(portable: GraphModule) -> GraphModule:
    """The integer kernels of a graph of the portable form, as a converted module of its own."""
    runnable = lower(shallow_copy(portable))
    runnable.meta[CONVERTED] = True
    return runnable


def lower(module: GraphModule) -> GraphModule:
    """Rewrite a graph of the portable form in place so that it runs integer kernels."""
    with torch.no_grad():
        # Ops that move values first: what they return may be a view, which summing must know.
        for node in list(module.graph.nodes):
            if node.target in CARRIES_INT8:
                _run_on_integers(module, node)
        for node in list(module.graph.nodes):
            if node.target in (CONVOLUTION, LINEAR) and _is_quantized(node):
                _replace(module, _match(node))
    return finish(module)


def _is_quantized(layer: Node) -> bool:
    return _is(layer.args[0], ops.dequantize) and _is(layer.args[1], ops.dequantize_weight)


def _is(value: Any, target: Any) -> bool:
    return isinstance(value, Node) and value.target is target


def _match(layer: Node) -> _Kernel:
    """What the kernel of a layer can take in.

    A residual addition is taken in only where both its other term and its result are uint8:
    then the kernel adds in place.
    """
    addition = only_user(layer)
    if addition is not None and is_residual(layer, addition):
        summand = addition.args[1] if addition.args[0] is layer else addition.args[0]
        activation = _activation(addition, layer)
        if activation is not None and activation.target is not aten.relu.default:
            activation = None
        tail = activation or addition
        output = _quantizer(tail)
        if output is not None and _is(summand, ops.dequantize):
            return _Kernel(layer, tail, addition, summand, activation, output)
    activation = _activation(layer, layer)
    tail = activation or layer
    return _Kernel(layer, tail, activation=activation, output=_quantizer(tail))


def _activation(node: Node, layer: Node) -> Node | None:
    user = only_user(node)
    if user is None or user.target not in ACTIVATIONS:
        return None
    return user if layer.target in ACTIVATIONS[user.target][1] else None


def _quantizer(tail: Node) -> Node | None:
    user = only_user(tail)
    return user if _is(user, ops.quantize) else None


def _replace(module: GraphModule, kernel: _Kernel) -> None:
    layer, graph = kernel.layer, module.graph
    dtype, replaced = torch.uint8, kernel.output
    scale, zero_point = (1.0, 0) if replaced is None else (replaced.args[1], replaced.args[2])
    if replaced is None:
        replaced, dtype = kernel.tail, torch.float32
        cast = only_user(replaced)
        wanted = cast_dtype(cast)
        if cast is not None and wanted in _FLOAT_OUTPUTS[layer.target]:
            replaced, dtype = cast, wanted
    before = _source_arguments(layer)
    behind = (scale, zero_point, dtype)
    with graph.inserting_before(replaced):
        weights = _weights(module, layer)
        inside = (*before, *weights, _bias(layer))
        post_op = _post_op(kernel.activation)
        if layer.target is LINEAR:
            result = graph.call_function(
                onednn.qlinear_pointwise.default, (*inside, *behind, *post_op)
            )
        elif kernel.summand is None:
            result = graph.call_function(
                onednn.qconv_pointwise.default, (*inside, *_geometry(layer), *behind, *post_op)
            )
        else:
            result = _summing_convolution(graph, kernel, before, weights, behind)
    result.meta = {"val": replaced.meta["val"], OP_NAME: layer.meta.get(OP_NAME, layer.name)}
    replaced.replace_all_uses_with(result)


def _source_arguments(layer: Node) -> tuple[Node, float, int]:
    quantized, scale, zero_point, _ = layer.args[0].args
    return quantized, scale, zero_point


def _summing_convolution(
    graph: torch.fx.Graph,
    kernel: _Kernel,
    before: tuple[Node, float, int],
    weights: tuple[Node, Node, Node],
    behind: tuple[float, int, torch.dtype],
) -> Node:
    layer = kernel.layer
    assert kernel.summand is not None
    assert kernel.addition is not None
    accumulator, scale, zero_point, _ = kernel.summand.args
    if not _may_overwrite(accumulator, kernel.addition, before[0]):
        accumulator = graph.call_function(
            aten.clone.default, (accumulator,), {"memory_format": torch.channels_last}
        )
    unary = "none" if kernel.activation is None else "relu"
    return graph.call_function(
        onednn.qconv2d_pointwise.binary,
        (
            *before,
            *weights,
            accumulator,
            _bias(layer),
            *_geometry(layer),
            *behind,
            scale,
            zero_point,
            "sum",
            1.0,
            unary,
            [],
            "",
        ),
    )


def _may_overwrite(summand: Node, addition: Node, reads: Node) -> bool:
    """Whether a summing kernel may write its result over its summand.

    Only where the summand is another kernel's own result, nothing else reads it, or a view of it,
    later, and the kernel does not read it as its input too.
    """
    if summand.target not in _OVERWRITABLE or summand is reads:
        return False
    order = {node: index for index, node in enumerate(summand.graph.nodes)}
    readers: set[Node] = set()
    for user in summand.users:
        readers.update(user.users if user.target is ops.dequantize else (user,))
    return all(
        order[reader] < order[addition] and reader.target not in CARRIES_INT8
        for reader in readers - {addition}
    )


def _weights(module: GraphModule, layer: Node) -> tuple[Node, Node, Node]:
    """The packed weight, its scales and its zero points (all zero), as nodes of the graph."""
    integers_node, scales_node = layer.args[1].args
    integers = attribute(module, integers_node.target)
    scales = attribute(module, scales_node.target)
    shape = [_likely(size) for size in layer.args[0].meta["val"].shape]
    if layer.target is LINEAR:
        rows = 1
        for size in shape[:-1]:
            rows *= size
        packed = onednn.qlinear_prepack(integers, [rows, shape[-1]])
    else:
        _, scale, zero_point = _source_arguments(layer)
        packed = onednn.qconv_prepack(integers, scales, scale, zero_point, *_geometry(layer), shape)
    zeros = torch.zeros(scales.numel(), dtype=torch.long)
    return (
        _buffer(module, f"{layer.name}_packed", packed),
        scales_node,
        _buffer(module, f"{layer.name}_zero_points", zeros),
    )


def _likely(size: Any) -> int:
    """A size; for one that is free, what it was when the graph was captured."""
    if isinstance(size, torch.SymInt):
        return int(size.node.hint) if size.node.has_hint() else 1
    return int(size)


def _buffer(module: GraphModule, name: str, value: torch.Tensor) -> Node:
    module.register_buffer(name, value, persistent=False)
    node: Node = module.graph.get_attr(name)
    node.meta["val"] = value
    return node


def _bias(layer: Node) -> Node | None:
    bias = layer.args[2] if len(layer.args) > 2 else layer.kwargs.get("bias")
    return bias if isinstance(bias, Node) else None


def _geometry(layer: Node) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding, dilation and groups of a convolution."""
    given = [*layer.args[3:], *[None] * 4][:4]
    names = ("stride", "padding", "dilation", "groups")
    defaults: tuple[Any, ...] = ([1, 1], [0, 0], [1, 1], 1)
    values = [
        layer.kwargs.get(name, default) if value is None else value
        for value, name, default in zip(given, names, defaults, strict=True)
    ]
    stride, padding, dilation = (
        list(value) * 2 if len(value) == 1 else list(value) for value in values[:3]
    )
    return stride, padding, dilation, int(values[3])


def _post_op(activation: Node | None) -> tuple[str, list[Any], str]:
    """OneDNN's name of an activation, its scalars and its algorithm."""
    if activation is None:
        return "none", [], ""
    name, _ = ACTIVATIONS[activation.target]
    if name == "hardtanh":
        given = activation.args[1:]
        bounds = (*given, *(-1.0, 1.0)[len(given) :])
        return name, [float(bound) for bound in bounds], ""
    if name == "gelu":
        return name, [], str(activation.kwargs.get("approximate", "none"))
    return name, [], ""


def _run_on_integers(module: GraphModule, node: Node) -> None:
    """Let an op that only moves values read and write integers, where both sides are quantized."""
    source, quantizer = node.args[0], _quantizer(node)
    if not _is(source, ops.dequantize) or quantizer is None:
        return
    if source.args[1:3] != quantizer.args[1:3]:
        return
    target = max_pool2d_uint8 if node.target is aten.max_pool2d.default else node.target
    with module.graph.inserting_before(quantizer):
        moved = module.graph.call_function(target, (source.args[0], *node.args[1:]), node.kwargs)
    moved.meta = {"val": quantizer.meta["val"], OP_NAME: node.meta.get(OP_NAME, node.name)}
    quantizer.replace_all_uses_with(moved)
