"""From quantize/dequantize pairs to oneDNN's integer kernels, run eagerly, no compiler."""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import GraphModule, Node

from neural_mp.adaptors.pytorch import kernel_ops as kernels
from neural_mp.adaptors.pytorch import quantize_ops as ops
from neural_mp.adaptors.pytorch.casts import cast_dtype
from neural_mp.adaptors.pytorch.fusion import OVERWRITABLE, Kernel, is_node, match, quantizer
from neural_mp.adaptors.pytorch.graph import (
    ACTIVATIONS,
    CONCATENATION,
    CONVOLUTIONS,
    EMBEDDING,
    LINEAR,
    PADDING,
    quantize_agnostic,
)
from neural_mp.adaptors.pytorch.model import (
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
    **dict.fromkeys(CONVOLUTIONS, (torch.float32, torch.bfloat16)),
    LINEAR: (torch.float32, torch.bfloat16, torch.float16),
}


def runnable_form(portable: GraphModule) -> GraphModule:
    """The integer kernels of a graph of the portable form, as a module of its own."""
    return lower(shallow_copy(portable))


def lower(module: GraphModule) -> GraphModule:
    """Rewrite a graph of the portable form in place so that it runs integer kernels."""
    with torch.no_grad():
        # Ops that move values first: what they return may be a view, which summing must know.
        for node in list(module.graph.nodes):
            if quantize_agnostic(node):
                _run_on_integers(module, node)
        module.graph.eliminate_dead_code()
        for node in list(module.graph.nodes):
            if node.target in _FLOAT_OUTPUTS and is_node(node.args[1], ops.dequantize_weight):
                _lower_layer(module, node)
            elif node.target is EMBEDDING and is_node(node.args[0], ops.dequantize_weight):
                arguments = (*node.args[0].args, node.args[1])
                _call_instead(node, kernels.weight_only_embedding, arguments)
        module.graph.eliminate_dead_code()
        for node in list(module.graph.nodes):
            _call_conversion(module, node)
    return finish(module)


def _lower_layer(module: GraphModule, layer: Node) -> None:
    if is_node(layer.args[0], ops.dequantize) or is_node(layer.args[0], ops.dequantize_dynamic):
        _replace(module, match(layer))
    elif layer.target is LINEAR:
        arguments = (layer.args[0], *layer.args[1].args, _bias(layer))
        _call_instead(layer, kernels.weight_only_linear, arguments)


def _call_instead(layer: Node, kernel: Any, arguments: tuple[Any, ...]) -> None:
    """Call a function of ours instead of a layer."""
    with layer.graph.inserting_before(layer):
        result = layer.graph.call_function(kernel, arguments)
    result.meta = dict(layer.meta)
    layer.replace_all_uses_with(result)


def _replace(module: GraphModule, kernel: Kernel) -> None:
    layer, graph = kernel.layer, module.graph
    dtype, replaced = torch.uint8, kernel.output
    scale, zero_point = (1.0, 0) if replaced is None else (replaced.args[1], replaced.args[2])
    if replaced is None:
        replaced, dtype = kernel.tail, torch.float32
        cast = only_user(replaced)
        wanted = cast_dtype(cast)
        if cast is not None and kernel.addition is None and wanted in _FLOAT_OUTPUTS[layer.target]:
            replaced, dtype = cast, wanted
    before = _source_arguments(layer)
    behind = (scale, zero_point, dtype)
    with graph.inserting_before(replaced):
        weights = _weights(module, layer)
        inside = (*before, *weights, _bias(layer))
        post_op = _post_op(kernel.activation)
        if kernel.summand is not None and layer.target is LINEAR:
            result = _adding_product(graph, kernel, (*before, *weights), behind, post_op)
        elif kernel.summand is not None:
            result = _summing_convolution(graph, kernel, (*before, *weights), behind)
        elif layer.target is LINEAR:
            product = onednn.qlinear_pointwise
            target = product.tensor if isinstance(before[1], Node) else product.default
            result = graph.call_function(target, (*inside, *behind, *post_op))
        else:
            result = graph.call_function(
                onednn.qconv_pointwise.default, (*inside, *geometry(layer), *behind, *post_op)
            )
    result.meta = {"val": replaced.meta["val"], OP_NAME: layer.meta.get(OP_NAME, layer.name)}
    replaced.replace_all_uses_with(result)


def _source_arguments(layer: Node) -> tuple[Node, Any, Any]:
    quantized, scale, zero_point, _ = layer.args[0].args
    return quantized, scale, zero_point


def _adding_product(
    graph: torch.fx.Graph,
    kernel: Kernel,
    before: tuple[Any, ...],
    behind: tuple[float, int, torch.dtype],
    post_op: tuple[str, list[Any], str],
) -> Node:
    adding = (kernel.summand, _bias(kernel.layer), *behind, 1.0, 0, "add", 1.0)
    return graph.call_function(onednn.qlinear_pointwise.binary, (*before, *adding, *post_op))


def _summing_convolution(
    graph: torch.fx.Graph,
    kernel: Kernel,
    before: tuple[Any, ...],
    behind: tuple[float, int, torch.dtype],
) -> Node:
    layer = kernel.layer
    assert kernel.summand is not None
    assert kernel.addition is not None
    accumulator, scale, zero_point = kernel.summand, 1.0, 0
    if kernel.output is not None:
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
            accumulator,
            _bias(layer),
            *geometry(layer),
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
    if summand.target not in OVERWRITABLE or summand is reads:
        return False
    order = {node: index for index, node in enumerate(summand.graph.nodes)}
    readers: set[Node] = set()
    for user in summand.users:
        readers.update(user.users if user.target is ops.dequantize else (user,))
    return all(
        order[reader] < order[addition] and not quantize_agnostic(reader)
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
        packed = onednn.qconv_prepack(integers, scales, scale, zero_point, *geometry(layer), shape)
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


def geometry(layer: Node) -> tuple[list[int], list[int], list[int], int]:
    """Stride, padding, dilation and groups of a convolution."""
    given = [*layer.args[3:], *[None] * 4][:4]
    names = ("stride", "padding", "dilation", "groups")
    defaults: tuple[Any, ...] = ([1], [0], [1], 1)
    values = [
        layer.kwargs.get(name, default) if value is None else value
        for value, name, default in zip(given, names, defaults, strict=True)
    ]
    axes = CONVOLUTIONS[layer.target]
    stride, padding, dilation = (
        list(value) * axes if len(value) == 1 else list(value) for value in values[:3]
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
    behind = quantizer(node)
    sources = node.args[0] if node.target is CONCATENATION else [node.args[0]]
    if behind is None or not all(is_node(source, ops.dequantize) for source in sources):
        return
    scale, zero_point = behind.args[1:3]
    if any(source.args[1:3] != (scale, zero_point) for source in sources):
        return
    integers: Any = [source.args[0] for source in sources]
    rest, target = node.args[1:], node.target
    if node.target is aten.max_pool2d.default:
        target = kernels.max_pool2d_uint8
    elif node.target is PADDING:
        rest = (rest[0], zero_point)
    if node.target is not CONCATENATION:
        (integers,) = integers
    with module.graph.inserting_before(behind):
        moved = module.graph.call_function(target, (integers, *rest), node.kwargs)
    moved.meta = {"val": behind.meta["val"], OP_NAME: node.meta.get(OP_NAME, node.name)}
    behind.replace_all_uses_with(moved)


def _call_conversion(module: GraphModule, node: Node) -> None:
    """Let a conversion that is left read its zero point from a tensor made once."""
    if node.target is ops.quantize:
        x, scale, zero_point = node.args
        offset = _buffer_before(module, node, zero_point + 0.5)
        target: Any = kernels.quantize_uint8
        arguments: tuple[Any, ...] = (x, offset, 1 / scale)
    elif node.target is ops.dequantize:
        q, scale, zero_point, dtype = node.args
        offset = _buffer_before(module, node, float(zero_point))
        target, arguments = kernels.dequantize_uint8, (q, scale, offset, dtype)
    else:
        return
    node.target, node.args = target, arguments


def _buffer_before(module: GraphModule, node: Node, value: float) -> Node:
    with module.graph.inserting_before(node):
        return _buffer(module, f"{node.name}_offset", torch.tensor(value))
