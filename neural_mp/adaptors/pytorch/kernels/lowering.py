"""Lowering of quantize/dequantize pairs to oneDNN's integer kernels, run without a compiler.

Convolutions of single pixels, as in squeeze-and-excitation, run as products: the costs of a
convolution of its own exceed those of the product.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from neural_mp.adaptors.common.kernels.fusion import Step
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph import kernel_ops as kernels
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.graph.casts import cast_dtype
from neural_mp.adaptors.pytorch.graph.float_weights import RESTORING, dequantize_mxfp4
from neural_mp.adaptors.pytorch.graph.fusion import (
    OVERWRITABLE,
    Group,
    find_only_user,
    find_quantizer,
    is_node,
    match_group,
    post_op_of,
)
from neural_mp.adaptors.pytorch.graph.model import Part, TorchModel
from neural_mp.adaptors.pytorch.graph.recurrent import RECURRENT_INT8, lower_recurrent
from neural_mp.adaptors.pytorch.kernels.attention import call_products
from neural_mp.adaptors.pytorch.kernels.batch_parts import SPLITS, computes_samples_alone
from neural_mp.adaptors.pytorch.kernels.float_kernels import (
    call_packed_kernels,
    list_marked_kernels,
)
from neural_mp.adaptors.pytorch.kernels.kernel_probes import writes_fast
from neural_mp.adaptors.pytorch.versions import INTEGER_CONVOLUTIONS, find_integer_convolution
from neural_mp.util.system.memory import FREED

aten = torch.ops.aten
onednn = torch.ops.onednn

#: Float dtypes that the kernels can write directly; see `writes_fast`.
_FLOAT_OUTPUTS = {
    **dict.fromkeys(layers.CONVOLUTIONS, (torch.float32, torch.bfloat16)),
    layers.LINEAR: (torch.float32, torch.bfloat16, torch.float16),
}
#: Scale, zero point and dtype of a kernel's output.
_Output = tuple[float, int, torch.dtype]


def rewrite_graphs(model: TorchModel, rewrite: Callable[[GraphModule], None]) -> TorchModel:
    """Return the model with the portable form of every graph rewritten; keep the original."""
    parts = {}
    for path, part in model.parts.items():
        portable = fx.copy_graph_shallowly(part.portable)
        rewrite(portable)
        if _have_same_calls(portable, part.portable) and not list_marked_kernels(portable):
            parts[path] = part
            continue
        portable = fx.finish_graph(portable)
        parts[path] = Part(portable, lower_to_kernels(portable), part.example, True)
        FREED.note_freed_bytes(sum(value.nbytes for value in part.portable.parameters()))
    return replace(model, parts=parts, original=None)


def _have_same_calls(first: GraphModule, second: GraphModule) -> bool:
    """Whether two graphs with shared weights run the same calls on the same constants."""
    calls = [
        [(node.op, node.target, str(node.args), str(node.kwargs)) for node in graph.nodes]
        for graph in (first.graph, second.graph)
    ]
    return calls[0] == calls[1]


def lower_to_kernels(portable: GraphModule) -> GraphModule:
    """Lower a portable graph to integer and packed kernels, as a separate module."""
    module = fx.copy_graph_shallowly(portable)
    with torch.no_grad():
        # Ops that move values first: their results may be views, which a sum must not overwrite.
        for node in list(module.graph.nodes):
            if layers.quantize_agnostic(node):
                _run_on_integers(module, node)
        module.graph.eliminate_dead_code()
        for node in list(module.graph.nodes):
            if _quantizes_rgb(node):
                _call_quantization(module, node, kernels.quantize_rgb, node.args[0])
        for node in list(module.graph.nodes):
            if any(is_node(source, ops.dequantize_grouped) for source in node.all_input_nodes):
                _lower_low_bits(module, node)
            elif node.target in _FLOAT_OUTPUTS and is_node(node.args[1], ops.dequantize_weight):
                _lower_layer(module, node)
            elif node.target is layers.EMBEDDING and is_node(node.args[0], ops.dequantize_weight):
                values = (*node.args[0].args, node.args[1])
                _replace_with_kernel(node, kernels.weight_only_embedding, values)
            elif node.target is layers.LINEAR and is_node(node.args[1], *RESTORING):
                is_mxfp4 = node.args[1].target is dequantize_mxfp4
                values = (node.args[0], *node.args[1].args, is_mxfp4, _find_bias_node(node))
                _replace_with_kernel(node, kernels.float_format_linear, values)
            elif node.target in RECURRENT_INT8:
                lower_recurrent(module, node)
        call_packed_kernels(module)
        call_products(module)
        call_pixel_products(module)
        fold_scales(module)
        module.graph.eliminate_dead_code()
        for node in list(module.graph.nodes):
            _lower_conversion(module, node)
    module.meta[SPLITS] = computes_samples_alone(portable)
    return fx.finish_graph(module)


def _lower_layer(module: GraphModule, layer: Node) -> None:
    if is_node(layer.args[0], ops.dequantize_dynamic):
        _lower_dynamic(module, layer)
    elif is_node(layer.args[0], ops.dequantize):
        _lower_group(module, match_group(layer))
    elif layer.target is layers.LINEAR:
        _replace_with_kernel(
            layer,
            kernels.weight_only_linear,
            (layer.args[0], *layer.args[1].args, _find_bias_node(layer)),
        )


def _lower_low_bits(module: GraphModule, node: Node) -> None:
    """Call the kernel of a layer with a weight in 4 bits or less."""
    weight = fx.get_arguments(node)["weight"]
    constants, bits = weight.args[:3], weight.args[3] if len(weight.args) > 3 else 4
    if node.target is layers.EMBEDDING:
        _replace_with_kernel(node, kernels.low_bit_embedding, (*constants, bits, node.args[1]))
    elif node.target is layers.LINEAR and bits != 4:
        _replace_with_kernel(
            node, kernels.low_bit_linear, (node.args[0], *constants, bits, _find_bias_node(node))
        )
    elif node.target is layers.LINEAR:
        name = f"{node.name}_kernel_weight"
        module.add_submodule(name, kernels.KernelWeight())
        weight = fx.read_constant(module, name, node)
        _replace_with_kernel(
            node, kernels.four_bit_linear, (node.args[0], weight, *constants, _find_bias_node(node))
        )


def _replace_with_kernel(
    layer: Node, kernel: Callable[..., torch.Tensor], values: tuple[Any, ...]
) -> None:
    with layer.graph.inserting_before(layer):
        result = layer.graph.call_function(kernel, values)
    result.meta = dict(layer.meta)
    layer.replace_all_uses_with(result)


def _lower_group(module: GraphModule, group: Group) -> None:
    """Call an integer kernel instead of a layer and the ops fused into it."""
    layer, replaced = group.head, find_quantizer(group.tail)
    if replaced is not None:
        output: _Output = (replaced.args[1], replaced.args[2], torch.uint8)
    else:
        replaced, dtype = group.tail, torch.float32
        cast = find_only_user(replaced)
        requested = cast_dtype(cast)
        floats = _FLOAT_OUTPUTS[layer.target] if group.residual_sum is None else ()
        if cast is not None and requested in floats and writes_fast(layer.target, requested):
            replaced, dtype = cast, requested
        output = (1.0, 0, dtype)
    operands = (*layer.args[0].args[:3], *_pack_weight(module, layer, replaced))
    with module.graph.inserting_before(replaced):
        called = module.graph.call_function(*_make_kernel_call(group, operands, output))
        result = _with_all_axes(called, layer, operands[0])
    encoding = QuantParams(*output[:2]) if output[2] is torch.uint8 else None
    result.meta = {"val": replaced.meta["val"]}
    called.meta = {
        "val": replaced.meta["val"],
        fx.OP_NAME: layer.meta.get(fx.OP_NAME, layer.name),
        fx.RESULT: (fx.get_tensor_name(group.tail), encoding),
    }
    replaced.replace_all_uses_with(result)


def _lower_dynamic(module: GraphModule, layer: Node) -> None:
    """Call an integer kernel with the range of each row, whose kernel has one scale of inputs."""
    integers, scales, zero_points, _ = layer.args[0].args
    stored, steps = (fx.get_constant(module, node) for node in layer.args[1].args)
    assert stored is not None
    assert steps is not None
    sums = fx.add_constant(module, f"{layer.name}_sums", stored.sum(1) * steps, layer)
    weight = _pack_weight(module, layer, layer)
    with module.graph.inserting_before(layer):
        product = module.graph.call_function(
            onednn.qlinear_pointwise.default,
            (integers, 1.0, 0, *weight, None, 1.0, 0, torch.float32, "none", [], ""),
        )
        operands = (product, scales, zero_points, sums, _find_bias_node(layer))
        result = module.graph.call_function(kernels.scale_rows, operands)
        product.meta = {"val": layer.meta["val"].float(), **_op_name(layer)}
        result.meta = {"val": product.meta["val"], **_op_name(layer)}
        result.meta[fx.RESULT] = (fx.get_tensor_name(layer), None)
        if layer.meta["val"].dtype is not torch.float32:
            dtype = layer.meta["val"].dtype
            result = module.graph.call_function(aten.to.dtype, (result, dtype))
            result.meta = {"val": layer.meta["val"]}
    layer.replace_all_uses_with(result)


def _op_name(layer: Node) -> dict[str, str]:
    return {fx.OP_NAME: layer.meta.get(fx.OP_NAME, layer.name)}


def _with_all_axes(called: Node, layer: Node, integers: Node) -> Node:
    """Return the result of a kernel with the axes of its layer, also if data select no row.

    Kernels of dense layers return [0, outputs] for an input without values, those of
    one-dimensional convolutions images. Empty inputs of the model never reach the kernels.
    """
    graph, expected = layer.graph, layer.meta["val"]
    if all(not isinstance(size, torch.SymInt) or size.node.has_hint() for size in expected.shape):
        return called
    if layer.target is layers.LINEAR and expected.ndim > 2:
        sizes: list[Any] = [
            _add_size_node(integers, axis, expected) for axis in range(expected.ndim - 1)
        ]
        sizes.append(int(expected.shape[-1]))
    elif layers.CONVOLUTIONS.get(layer.target) == 1:
        first, last = (_add_size_node(called, axis, expected) for axis in (0, -1))
        sizes = [first, int(expected.shape[1]), last]
    else:
        return called
    return graph.call_function(aten.view.default, (called, sizes))


def _add_size_node(source: Node, axis: int, expected: torch.Tensor) -> Node:
    size = source.graph.call_function(aten.sym_size.int, (source, axis))
    size.meta["val"] = expected.shape[axis]
    return size


def _make_kernel_call(
    group: Group, operands: tuple[Any, ...], output: _Output
) -> tuple[Any, tuple[Any, ...]]:
    """Return the integer kernel of a fusion group and its arguments.

    `operands` are integers, scale and zero point of the input, then those of the weight.
    """
    layer, summed, activation = group.head, group.residual_sum, group.activation
    if activation is not None and _saturates_at_bounds(activation, output):
        activation = None  # the integers saturate by themselves
    post_op, bias = post_op_of(activation), _find_bias_node(layer)
    if layer.target is layers.LINEAR:
        product = onednn.qlinear_pointwise
        if summed is not None:
            # The kernel ignores the strides of the summand, so make it contiguous.
            summand = layer.graph.call_function(aten.contiguous.default, (summed.operand,))
            added = (summand, bias, *output, 1.0, 0, "add", 1.0)
            return product.binary, (*operands, *added, *post_op)
        target = product.tensor if isinstance(operands[1], Node) else product.default
        return target, (*operands, bias, *output, *post_op)
    inside = (bias, *layers.convolution_geometry(layer), *output)
    if summed is None:
        kernel = find_integer_convolution(layers.CONVOLUTIONS[layer.target])
        return kernel, (*operands, *inside, *post_op)
    accumulator: Any = summed.operand
    stored = [1.0, 0]
    if output[2] is torch.uint8:
        accumulator, *stored = accumulator.args[:3]
        if not _may_overwrite(accumulator, summed.ops[0], operands[0]):
            accumulator = layer.graph.call_function(
                aten.clone.default, (accumulator,), {"memory_format": torch.channels_last}
            )
    added = (accumulator, *inside, *stored, "sum", 1.0)
    return onednn.qconv2d_pointwise.binary, (*operands, *added, *post_op)


def _may_overwrite(summand: Node, addition: Node, reads: Node) -> bool:
    """Whether a summing kernel may write its result over its summand.

    Requires that the summand is another kernel's own result, has no later readers, directly or
    through a view, and is not also the kernel's input.
    """
    if summand.target not in OVERWRITABLE or summand is reads:
        return False
    order = {node: index for index, node in enumerate(summand.graph.nodes)}
    readers: set[Node] = set()
    for user in summand.users:
        readers.update(user.users if user.target is ops.dequantize else (user,))
    return all(
        order[reader] < order[addition] and not layers.quantize_agnostic(reader)
        for reader in readers - {addition}
    )


def _pack_weight(module: GraphModule, layer: Node, next_node: Node) -> tuple[Node, Node, Node]:
    """Return the packed weight, its scales and its zero points (all zero) as graph nodes."""
    integers_node, scales_node = layer.args[1].args
    integers = fx.get_attribute(module, integers_node.target)
    scales = fx.get_attribute(module, scales_node.target)
    shape = [fx.get_likely_size(size) for size in layer.args[0].meta["val"].shape]
    if is_node(layer.args[0].args[0], kernels.quantize_rgb):
        integers, shape[1] = F.pad(integers, (0, 0, 0, 0, 0, 1)), 4
    if layer.target is layers.LINEAR:
        packed = onednn.qlinear_prepack(integers, [math.prod(shape[:-1]), shape[-1]])
    else:
        _, scale, zero_point, _ = layer.args[0].args
        packed = onednn.qconv_prepack(
            integers, scales, scale, zero_point, *layers.convolution_geometry(layer), shape
        )
    zeros = torch.zeros(scales.numel(), dtype=torch.long)
    return (
        fx.add_constant(module, f"{layer.name}_packed", packed, next_node),
        scales_node,
        fx.add_constant(module, f"{layer.name}_zero_points", zeros, next_node),
    )


def _find_bias_node(layer: Node) -> Node | None:
    bias = fx.get_arguments(layer)["bias"]
    return bias if isinstance(bias, Node) else None


def _saturates_at_bounds(activation: Step[Node, Node], output: _Output) -> bool:
    """Whether the smallest and the largest integer of a result are the bounds of an activation."""
    scale, zero_point, dtype = output
    bounds = [0.0, math.inf] if activation.kind == "relu" else post_op_of(activation)[1]
    if dtype is not torch.uint8 or len(bounds) < 2:
        return False
    low, high = (bound / scale + zero_point for bound in bounds)
    # Within half a step, a bound is rounded to the integer.
    return low <= 0.5 and high >= ops.QMAX - 0.5


def _run_on_integers(module: GraphModule, node: Node) -> None:
    """Run a value-moving op on integers if its inputs and output share quantization parameters."""
    output = find_quantizer(node)
    sources = node.args[0] if node.target is layers.CONCATENATION else [node.args[0]]
    if output is None or not all(is_node(source, ops.dequantize) for source in sources):
        return
    scale, zero_point = output.args[1:3]
    if any(source.args[1:3] != (scale, zero_point) for source in sources):
        return
    integers: Any = [source.args[0] for source in sources]
    rest, target = node.args[1:], node.target
    if node.target is layers.MAX_POOLING:
        target = kernels.max_pool2d_uint8
    elif node.target is layers.PADDING:
        rest = (rest[0], zero_point)
    if node.target is not layers.CONCATENATION:
        (integers,) = integers
    with module.graph.inserting_before(output):
        moved = module.graph.call_function(target, (integers, *rest), node.kwargs)
    name = node.meta.get(fx.OP_NAME, node.name)
    encoding = QuantParams(scale, zero_point)
    moved.meta = {"val": output.meta["val"], fx.OP_NAME: name, fx.RESULT: (name, encoding)}
    output.replace_all_uses_with(moved)


def _lower_conversion(module: GraphModule, node: Node) -> None:
    """Make a remaining conversion read its zero point from a precomputed tensor."""
    if node.target is ops.quantize:
        x, scale, zero_point = node.args
        gated = _match_gated_operands(x)
        if gated is None:
            _call_quantization(module, node, kernels.quantize_uint8, x)
            return
        _call_quantization(module, node, kernels.quantize_gated, *gated)
        name = fx.get_tensor_name(x)
        node.meta = {**node.meta, fx.OP_NAME: name}
        node.meta[fx.RESULT] = (name, QuantParams(scale, zero_point))
        module.graph.erase_node(x)
    elif node.target is ops.dequantize:
        q, scale, zero_point, dtype = node.args
        node.args = (q, scale, _add_offset(module, node, float(zero_point)), dtype)
        node.target = kernels.dequantize_uint8


def _call_quantization(
    module: GraphModule, node: Node, kernel: Callable[..., torch.Tensor], *operands: Node
) -> None:
    _, scale, zero_point = node.args
    node.args = (*operands, _add_offset(module, node, zero_point + 0.5), 1 / scale)
    node.target = kernel


def _add_offset(module: GraphModule, node: Node, value: float) -> Node:
    return fx.add_constant(module, f"{node.name}_offset", torch.tensor(value), node)


def _match_gated_operands(product: Node) -> tuple[Node, Node] | None:
    """Return image and gate of a product of which only one op reads the result, if it is one.

    A gate is one number per channel, or per channel of every sample. The image is a kernel's
    result in channels-last memory: in any other, two operands would repeat a value in a row, for
    which the op of a sum and a product has no vector code.
    """
    if product.target is not aten.mul.Tensor or find_only_user(product) is None:
        return None
    for image, gate in (product.args, product.args[::-1]):
        if not is_node(image, *OVERWRITABLE) or not isinstance(gate, Node):
            continue
        wide, narrow = image.meta["val"], gate.meta.get("val")
        if not wide.dtype is torch.float32 is getattr(narrow, "dtype", None) or wide.ndim != 4:
            continue
        sizes, factors = fx.sizes_of_result(image), fx.sizes_of_result(gate)
        if factors[-3:] == (sizes[1], 1, 1) and factors[:-3] in ((), (1,), sizes[:1]):
            return image, gate
    return None


def _quantizes_rgb(node: Node) -> bool:
    """Whether a node quantizes an input of channels-first images that only convolutions read."""
    if node.target is not ops.quantize or node.args[0].op != "placeholder":
        return False
    value = node.args[0].meta["val"]
    return (
        value.ndim == 4
        and fx.get_size_expressions((value.shape[1], value.stride(3))) == (3, 1)
        and all(
            user.target is ops.dequantize and _reads_all_channels(layer, user)
            for user in node.users
            for layer in user.users
        )
    )


def _reads_all_channels(layer: Node, image: Node) -> bool:
    """Whether a node is an integer convolution whose every output reads all channels."""
    return (
        layer.target is layers.CONVOLUTION
        and layer.args[0] is image
        and is_node(layer.args[1], ops.dequantize_weight)
        and layers.convolution_geometry(layer)[3] == 1
    )


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
    weight, image = fx.get_constant(module, node.args[1]), cast(Node, node.args[0]).meta.get("val")
    if weight is None or not isinstance(image, torch.Tensor) or image.ndim != 4:
        return False
    _, padding, _, groups = layers.convolution_geometry(node)
    return (
        weight.dtype is image.dtype is torch.float32
        and fx.get_size_expressions(image.shape[2:]) == weight.shape[2:] == _ONE_PIXEL
        and not any(padding)
        and groups == 1
    )


def _call_product(module: GraphModule, layer: Node) -> None:
    weight = fx.get_constant(module, layer.args[1])
    assert weight is not None
    outputs, inputs = weight.shape[:2]
    transposed = fx.add_constant(module, f"{layer.name}_turned", weight.flatten(1).t(), layer)
    layer.args = (layer.args[0], transposed, fx.get_arguments(layer)["bias"], inputs, outputs)
    layer.kwargs = {}
    layer.target = kernels.run_pixel_product


_SUMMING = onednn.qconv2d_pointwise.binary
_KERNELS = INTEGER_CONVOLUTIONS | {
    _SUMMING,
    onednn.qlinear_pointwise.default,
    onednn.qlinear_pointwise.binary,
}
#: Names of the argument for the activation.
_ACTIVATIONS = ("attr", "unary_attr", "post_op_name", "unary_post_op")


def fold_scales(module: GraphModule) -> None:
    """Multiply scales of inputs, and of outputs without activation, by those of the weights.

    oneDNN then has fewer factors to arrange in every call. Results equal the former ones up to
    FP32 rounding, before they are rounded to integers.
    """
    for node in list(module.graph.nodes):
        if node.target in _KERNELS:
            _fold_scales(module, node)


def _fold_scales(module: GraphModule, kernel: Node) -> None:
    arguments = fx.get_arguments(kernel)
    scales, name = fx.get_constant(module, arguments["w_scale"]), arguments["w_scale"].name
    assert scales is not None
    factors = scales * arguments["x_scale"]
    changes: dict[str, Any] = {"x_scale": 1.0}
    activations = {arguments.get(name) for name in _ACTIVATIONS} - {None, "none"}
    if (
        arguments["output_dtype"] is torch.uint8
        and not activations
        and kernel.target is not onednn.qlinear_pointwise.binary
    ):
        factors = factors / arguments["output_scale"]
        stored = fx.get_constant(module, arguments["bias"])
        bias = torch.zeros_like(scales) if stored is None else stored
        bias = bias.float() / arguments["output_scale"] + arguments["output_zero_point"]
        changes["bias"] = fx.add_constant(module, f"{name}_bias", bias, kernel)
        changes |= {"output_scale": 1.0, "output_zero_point": 0}
        if kernel.target is _SUMMING:
            changes["accum_scale"] = arguments["accum_scale"] / arguments["output_scale"]
    changes["w_scale"] = fx.add_constant(module, f"{name}_folded", factors, kernel)
    fx.set_arguments(kernel, **changes)
