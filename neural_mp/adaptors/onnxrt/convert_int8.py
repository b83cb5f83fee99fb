"""Conversion of ops for the integer kernels of ONNX Runtime.

Convolutions and joining ops are placed between DequantizeLinear and QuantizeLinear, which ONNX
Runtime fuses into one kernel. Matrix products are written as that kernel
(`com.microsoft.MatMulIntegerToFloat`, in ONNX Runtime's `ContribOperators.md`): fusion would
exclude the bias, and keeps a product of known size with a bias in float.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.common.tensor_variants import UINT8
from neural_mp.adaptors.onnxrt.convert_gru import PRODUCT
from neural_mp.adaptors.onnxrt.fusion import FusionGroup, limits
from neural_mp.adaptors.onnxrt.graph_edit import array_of, input_of, known_array, put_input
from neural_mp.adaptors.onnxrt.quant_params import StoredWeight, store_bias, store_weight
from neural_mp.adaptors.onnxrt.tensor_variants import Variants
from neural_mp.core.precision import OpConfig


def write_kernel(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a convolution or joining op with its fused ops."""
    head = fusion_group.head
    if config.weight is not None:
        _quantize_parameters(variants, head, config)
    else:
        for position, value in enumerate(head.inputs):
            assert value is not None
            head.replace_input_with(position, variants.for_kernel(value))
    result, last = head.outputs[0], head
    tail = fusion_group.tail.outputs[0]
    kept_within = limits(fusion_group.tail) if fusion_group.activation is not None else None
    if kept_within is not None and not variants.encoding_of(tail).clamps(*kept_within):
        result, last = tail, fusion_group.tail
    variants.put(tail, UINT8, variants.quantize(tail, result, after=last))


def write_pool(variants: Variants, head: ir.Node) -> None:
    """Convert the mean of all positions of an image: the pooling has an integer kernel."""
    (data, *_), (tail,), name = head.inputs, head.outputs, str(head.name)
    assert data is not None
    assert data.shape is not None
    inputs = [variants.for_kernel(data)]
    pooled = variants.add("GlobalAveragePool", inputs, f"{name}/pooled", ir.DataType.FLOAT)
    stored = variants.quantize(tail, pooled)
    if not head.attributes.get_int("keepdims", 1):
        positions = np.arange(2, len(data.shape))
        axes = variants.names.constant(f"{name}.positions", positions)
        stored = variants.add("Squeeze", [stored, axes], f"{name}/squeezed", ir.DataType.UINT8)
    variants.put(tail, UINT8, stored)


def _quantize_parameters(variants: Variants, head: ir.Node, config: OpConfig) -> None:
    """Quantize input, weight and bias of a convolution."""
    data, weight_value, *rest = head.inputs
    assert data is not None
    weight, bias = known_array(weight_value), array_of(rest[0]) if rest else None
    assert config.weight is not None
    scale = variants.encoding_of(data).scale
    stored = store_weight(weight, 0, config.weight, bias, scale)
    stem = str(head.name)
    head.replace_input_with(0, variants.for_kernel(data))
    head.replace_input_with(1, variants.weight(f"{stem}.weight", stored))
    if bias is not None:
        scales = (stored.scales * np.float32(scale)).astype(np.float32)
        zeros = np.zeros(len(scales), np.int32)
        integers = StoredWeight(store_bias(bias, scales), scales, zeros, 0)
        head.replace_input_with(2, variants.weight(f"{stem}.bias", integers))


def write_product(variants: Variants, fusion_group: FusionGroup, config: OpConfig) -> None:
    """Convert a product with a constant matrix, including its bias."""
    head = fusion_group.head
    data = head.inputs[0]
    assert data is not None
    assert config.weight is not None
    matrix, bias = matrix_and_bias(head)
    if fusion_group.bias is not None:
        bias = known_array(fusion_group.bias.operand).reshape(-1)
    if config.approach == "dynamic":
        values, *parameters = variants.dynamic(data)
    else:
        values, parameters = variants.stored(data), list(variants.parameters(data))
    stored = store_weight(matrix, 1, config.weight)
    inputs = _factors(variants, head, [values, *parameters], stored, bias)
    variants.replace(head, PRODUCT, inputs, fusion_group.tail.outputs[0])


def write_pointwise(variants: Variants, head: ir.Node, config: OpConfig) -> None:
    """Convert a convolution of single positions whose result is read in float.

    The kernel of a convolution writes INT8 only. The same as a product, with the channels last,
    writes float: without rounding, and without a DequantizeLinear.
    """
    data, weight_value, *rest = head.inputs
    assert data is not None
    assert config.weight is not None
    weight, bias = known_array(weight_value), array_of(rest[0]) if rest else None
    stored = store_weight(weight.reshape(weight.shape[:2]).T, 1, config.weight)
    operands = [variants.channels_last(data, weight.ndim), *variants.parameters(data)]
    inputs = _factors(variants, head, operands, stored, bias)
    order = [0, weight.ndim - 1, *range(1, weight.ndim - 1)]
    variants.replace(head, PRODUCT, inputs, head.outputs[0], order=order)


def _factors(
    variants: Variants,
    head: ir.Node,
    data: list[ir.Value],
    stored: StoredWeight,
    bias: Array | None,
) -> list[ir.Value | None]:
    """Return the inputs of a product, from those of its data: uint8, scale, zero point."""
    (values, scale, zero), stem = data, str(head.name)
    integers, steps, zeros = variants.constants(f"{stem}.weight", stored)
    inputs: list[ir.Value | None] = [values, integers, scale, steps, zero, zeros]
    if bias is not None:
        inputs.append(variants.names.constant(f"{stem}.bias", bias.astype(np.float32)))
    return inputs


def matrix_and_bias(head: ir.Node) -> tuple[Array, Array | None]:
    """Return the matrix, shape [inputs, outputs], and bias of a layer, with factors applied."""
    weight = known_array(head.inputs[1])
    if head.op_type == "MatMul":
        return weight, None
    matrix = weight.T if head.attributes.get_int("transB", 0) else weight
    matrix = matrix * np.float32(head.attributes.get_float("alpha", 1.0))
    bias = array_of(input_of(head, 2))
    if bias is None:
        return matrix, None
    bias = bias.reshape(-1) * np.float32(head.attributes.get_float("beta", 1.0))
    return matrix, np.broadcast_to(bias, matrix.shape[1:])


def write_mover(variants: Variants, node: ir.Node) -> None:
    """Convert a quantize-agnostic op: the same op on uint8."""
    moved = node.inputs[0]
    assert moved is not None
    stored = variants.stored(moved)
    if node.op_type == "Pad":
        zero = variants.parameters(moved)[1]
        put_input(node, 2, zero)
    node.replace_input_with(0, stored)
    for result in node.outputs:
        variants.put_moved(result, moved)
