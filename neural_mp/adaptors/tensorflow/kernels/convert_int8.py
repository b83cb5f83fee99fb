"""Conversion of a layer and the ops fused into it to one integer kernel.

The kernels pad with the integer 0, which is the zero point only of non-negative tensors. Other
tensors are padded by a separate op before the kernel.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.named_graphs import BF16, FP32, UINT8
from neural_mp.adaptors.common.quant_params import STEPS, QuantParams
from neural_mp.adaptors.common.signatures.signature import Shape
from neural_mp.adaptors.tensorflow.graph.fusion import FusionGroup, compute_same_paddings
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, SUMMAND
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    NodeDef,
    TensorGraph,
    copy_node,
    get_integers_attribute,
    get_text_attribute,
    plain_name,
)
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import (
    F32,
    S8,
    U8,
    ZERO_POINT,
    Forms,
    Fused,
    Weight,
    make_convolution_node,
    make_product_node,
    quantize_weight,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow


@dataclass(frozen=True)
class Layer:
    """A layer with the ops fused into its kernel under a plan.

    Attributes:
        node: float op.
        group: ops fused into the kernel.
        sixteen: whether all readers of the result run in BF16.
    """

    node: NodeDef
    group: FusionGroup
    sixteen: bool

    @property
    def head(self) -> str:
        """Name of the layer."""
        return self.group.head

    @property
    def tail(self) -> str:
        """Node whose result the kernel computes."""
        return self.group.tail

    @property
    def activation(self) -> str | None:
        """The kernel's name for the activation; None if there is no activation."""
        return self.group.activation.kind if self.group.activation else None


def write_layer(
    forms: Forms, model: TensorFlowModel, layer: Layer, flow: QuantizationFlow, weight_limit: int
) -> str:
    """Write the kernel, with weights within ±`weight_limit`; return the name of its node."""
    node, value = layer.node, forms.source.constant_value(layer.node.input[1])
    scales = model.weight_scales.get(plain_name(node.input[1]))
    kernel = LAYERS[node.op]
    weight = quantize_weight(value, kernel.is_depthwise, weight_limit, scales)
    source, stored = plain_name(node.input[0]), None
    encoding = forms.get_quant_params(source)
    if encoding.zero_point != 0 and not kernel.is_dense:
        shape = model.shapes[source]
        amounts = compute_zero_padding(node, value, shape)
        assert amounts is not None  # otherwise int8 is ineligible
        if amounts.any():
            stored = _pad_quantized_input(forms, source, amounts, shape)
            node = copy_node(node)
            node.attr["padding"].s = b"VALID"
            node.attr.pop("explicit_paddings", None)
    bias = _bias_or_zeros(forms, layer, len(weight.limits)) + encoding.low * weight.sums
    call = _Call(forms, layer, weight, source, stored or forms.as_uint8(source), bias)
    if kernel.is_dense:
        return _write_product(call, layer.tail in flow.int8_outputs)
    return _write_convolution(call, node)


def _pad_quantized_input(forms: Forms, source: str, amounts: Array, shape: Shape) -> str:
    name = f"{source}/around_{'_'.join(map(str, amounts[1:3].reshape(-1)))}"
    if name in forms.graph:
        return name
    if forms.is_stored(source):
        zero_point = forms.get_quant_params(source).zero_point
        return pad_stored(forms, forms.as_uint8(source), name, amounts, zero_point, shape)
    inputs = [forms.as_float(source), forms.graph.put_constant(f"{name}/amounts", amounts)]
    padded = forms.graph.put_node("Pad", f"{name}/real", inputs, T=F32, Tpaddings=tf.int32)
    return forms.quantize_with_scale_of(padded, source, name)


def _bias_or_zeros(forms: Forms, layer: Layer, channels: int) -> Array:
    bias = layer.group.bias
    if bias is None or bias.operand is None:
        return np.zeros(channels)
    return forms.source.constant_value(bias.operand).astype(np.float64)


def map_int8_layers(model: TensorFlowModel, effective: Mapping[str, Precision]) -> dict[str, Layer]:
    """Return last node fused into the kernel of an INT8 layer → the layer."""
    consumers = model.graph.find_consumers()
    layers: dict[str, Layer] = {}
    for head, group in model.structure.fusion_groups.items():
        if effective.get(head) is Precision.INT8:
            group = group.fused_prefix(lambda name: effective[name] is Precision.INT8)
            readers = [effective.get(name) for name, _ in consumers[group.tail]]
            sixteen = bool(readers) and all(p is Precision.BF16 for p in readers)
            layers[group.tail] = Layer(model.graph.nodes[head], group, sixteen)
    return layers


@dataclass(frozen=True)
class _Call:
    """Arguments of a kernel: `stored`, the quantized tensor `source`, and the constants."""

    forms: Forms
    layer: Layer
    weight: Weight
    source: str
    stored: str
    bias: Array

    def device_inputs(self, bias: Array) -> list[tuple[str, tf.DType]]:
        head, forms = self.layer.head, self.forms
        return [
            (self.stored, U8),
            (forms.graph.put_constant(f"{head}/weight_int8", self.weight.integers, S8), S8),
            (forms.graph.put_constant(f"{head}/bias_int8", bias.astype(np.float32)), F32),
        ]

    def host_inputs(self) -> list[str]:
        head, forms, limits = self.layer.head, self.forms, self.weight.limits
        return [
            *make_kernel_limits(forms, self.source, forms.get_quant_params(self.source)),
            forms.graph.put_constant(f"{head}/weight_low", -limits),
            forms.graph.put_constant(f"{head}/weight_high", limits),
        ]

    def with_zero_point(self, node: NodeDef) -> NodeDef:
        """Record the input's zero point on a kernel's node, for rounding its weight again."""
        node.attr[ZERO_POINT].i = self.forms.get_quant_params(self.source).zero_point
        return node


def make_kernel_limits(forms: Forms, tensor: str, encoding: QuantParams) -> list[str]:
    """Return the range of a quantized tensor for a kernel without zero points."""
    return [
        forms.scalar_constant(0.0, f"{tensor}/least"),
        forms.scalar_constant(STEPS * encoding.scale, f"{tensor}/most"),
    ]


def _write_product(call: _Call, stored: bool) -> str:
    forms, layer = call.forms, call.layer
    device, host = call.device_inputs(call.bias), call.host_inputs()
    activation = [layer.activation] if layer.activation else []
    if stored:
        host += forms.range_constants(layer.tail)
        fused = Fused(device, host, ["BiasAdd", *activation, "Requantize"], U8)
        form = UINT8
    else:
        form = BF16 if layer.sixteen and layer.tail not in forms.outputs else FP32
        kind = tf.bfloat16 if form == BF16 else F32
        fused = Fused(device, host, ["BiasAdd", *activation, "Dequantize"], kind)
    name = forms.name_for(layer.tail, form)
    forms.graph.add_node(call.with_zero_point(make_product_node(name, fused)))
    forms.set_variant(layer.tail, form, name)
    return name


def _write_convolution(call: _Call, geometry: NodeDef) -> str:
    forms, layer = call.forms, call.layer
    result = forms.get_quant_params(layer.tail)
    summed = layer.group.residual_sum
    bias = call.bias - result.low
    device_sum, host_sum, steps = [], [], ["BiasAdd"]
    if summed is not None:
        assert summed.operand is not None
        added = forms.get_quant_params(summed.operand)
        bias = bias + added.low
        device_sum = [(forms.as_uint8(summed.operand), U8)]
        host_sum = make_kernel_limits(forms, summed.operand, added)
        steps.append(SUMMAND)
    clips_at_zero = layer.activation is not None and result.zero_point == 0
    if clips_at_zero or summed is not None:
        # The integer range starts at 0, so negative values are clipped in any case.
        steps.append("Relu")
    host = [*call.host_inputs(), *host_sum, *make_kernel_limits(forms, layer.tail, result)]
    fused = Fused([*call.device_inputs(bias), *device_sum], host, [*steps, "Requantize"], U8)
    name = forms.name_for(layer.tail, UINT8)
    forms.graph.add_node(call.with_zero_point(make_convolution_node(name, fused, geometry)))
    forms.set_variant(layer.tail, UINT8, _clip_activation(forms, layer, name, result))
    return name


def _clip_activation(forms: Forms, layer: Layer, name: str, result: QuantParams) -> str:
    """Apply the part of the activation's clipping that the quantized range does not cover.

    Needed if a tensor shares its scale with others (concatenation), so that its zero, or six, lies
    within the range.
    """
    limits: Mapping[str, int] = {}
    zero = result.zero_point
    if layer.activation is not None and zero > 0:
        limits = {"Maximum": zero}
    if layer.activation == "Relu6" and round(6 / result.scale) + zero < STEPS:
        limits = {**limits, "Minimum": round(6 / result.scale) + zero}
    for op, limit in limits.items():
        name = forms.clip_quantized(f"{layer.tail}/{op.lower()}", op, name, limit)
    return name


#: Channels → integer type that holds several of them: padding single bytes is 20 times slower.
_WIDE = {8: (tf.int64, np.int64), 4: (tf.int32, np.int32), 2: (tf.int16, np.int16)}


def compute_zero_padding(node: NodeDef, weight: Array, source: Shape) -> Array | None:
    """Return the zero padding, [4, 2], of a convolution with channels last.

    None if the padding depends on the input's size, and the size is unknown.
    """
    padding = get_text_attribute(node, "padding")
    if padding == "VALID":
        return np.zeros((4, 2), np.int32)
    if padding == "EXPLICIT":
        return np.array(get_integers_attribute(node, "explicit_paddings"), np.int32).reshape(4, 2)
    return compute_same_paddings(node, weight, source)


def pad_stored(
    forms: Forms, stored: str, name: str, amounts: Array, zero_point: int, shape: Shape
) -> str:
    """Pad a quantized tensor with its zero point; return the name of the node.

    `amounts` is the padding before and after every axis, [axes, 2].
    """
    graph = forms.graph
    paddings = graph.put_constant(f"{name}/amounts", amounts.astype(np.int32))
    last = forms.cast_to_uint8(stored, name)
    width = 1
    if shape is not None and len(shape) == 4 and None not in shape[1:] and not amounts[3].any():
        width = next((count for count in _WIDE if (shape[3] or 1) % count == 0), 1)
    kind, number = _WIDE.get(width, (tf.uint8, np.uint8))
    zero = np.full(width, zero_point, np.uint8).view(number)[0]
    if width > 1:
        assert shape is not None
        sizes = [size or -1 for size in shape]
        split = [-1, *sizes[1:3], sizes[3] // width, width]
        last = _put_reshape(graph, last, f"{name}/split", split)
        last = graph.put_node("Bitcast", f"{name}/wide", [last], T=tf.uint8, type=kind)
    value = graph.put_constant(f"{name}/zero", zero)
    last = graph.put_node(
        "PadV2", f"{name}/padded", [last, paddings, value], T=kind, Tpaddings=tf.int32
    )
    if width > 1:
        last = graph.put_node("Bitcast", f"{name}/bytes", [last], T=kind, type=tf.uint8)
        padded = [size + int(amounts[axis].sum()) for axis, size in enumerate(sizes)]
        last = _put_reshape(graph, last, f"{name}/joined", [-1, *padded[1:3], sizes[3]])
    return graph.put_node("Bitcast", name, [last], T=tf.uint8, type=U8)


def _put_reshape(graph: TensorGraph, tensor: str, name: str, sizes: list[int]) -> str:
    shape = graph.put_constant(f"{name}/sizes", np.array(sizes, np.int32))
    return graph.put_node("Reshape", name, [tensor, shape], T=tf.uint8, Tshape=tf.int32)
