"""Writing a layer, with all that its kernel runs along, as one integer kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.clusters import Cluster, Step
from neural_mp.adaptors.tensorflow.forms import BF16, FP32, INT8, UINT8, Forms
from neural_mp.adaptors.tensorflow.kernels import (
    F32,
    S8,
    SIGNED_ZERO,
    U8,
    Encoding,
    Fused,
    Weight,
    convolution_node,
    product_node,
    quantize_weight,
)
from neural_mp.adaptors.tensorflow.nodes import (
    Array,
    Consumers,
    NodeDef,
    TensorGraph,
    integers_attribute,
    plain,
    text_attribute,
)
from neural_mp.flow import Flow
from neural_mp.precision import Precision


@dataclass(frozen=True)
class Layer:
    """A layer with the steps its kernel runs under a plan.

    Attributes:
        node: the float op.
        steps: what runs along.
        read_padded: whether a layer that runs in INT8 pads the result with zeros.
        sixteen: whether everything that reads the result runs in BF16.
    """

    node: NodeDef
    steps: tuple[Step, ...]
    read_padded: bool
    sixteen: bool

    @classmethod
    def of(cls, graph: TensorGraph, consumers: Consumers, cluster: Cluster, flow: Flow) -> Layer:
        """What of a cluster runs in INT8: the steps up to the first that does not."""
        steps = []
        for step in cluster.steps:
            if any(flow.precisions[name] is not Precision.INT8 for name in step.nodes):
                break
            steps.append(step)
        tail = steps[-1].result if steps else cluster.head
        readers = [graph.nodes[name] for name, _ in consumers[tail]]
        padded = any(
            tail in flow.int8_reads.get(node.name, ()) and is_padded(node) for node in readers
        )
        low = bool(readers) and all(
            flow.precisions.get(node.name) is Precision.BF16 for node in readers
        )
        return cls(graph.nodes[cluster.head], tuple(steps), padded, low)

    @property
    def head(self) -> str:
        """The name of the layer."""
        return str(self.node.name)

    @property
    def tail(self) -> str:
        """The node whose result the kernel writes."""
        return self.steps[-1].result if self.steps else self.head

    @property
    def nodes(self) -> tuple[str, ...]:
        """All nodes that the kernel runs."""
        return (self.head, *(name for step in self.steps for name in step.nodes))

    def step(self, *kinds: str) -> Step | None:
        """The step of one of these kinds."""
        return next((step for step in self.steps if step.kind in kinds), None)

    @property
    def activation(self) -> str | None:
        """The kernel's word for the activation, if there is one."""
        return next((s.kind for s in self.steps if s.kind not in ("BiasAdd", "Sum")), None)


def is_padded(node: NodeDef) -> bool:
    """Whether a convolution pads its input with zeros."""
    padding = text_attribute(node, "padding")
    if node.op not in ("Conv2D", "DepthwiseConv2dNative") or padding == "VALID":
        return False
    return padding != "EXPLICIT" or any(integers_attribute(node, "explicit_paddings"))


def pads_nothing(node: NodeDef, weight: Array) -> bool:
    """Whether no zero is ever read: nothing is padded, or there is nothing to pad."""
    pointwise = text_attribute(node, "padding") == "SAME" and weight.shape[:2] == (1, 1)
    return not is_padded(node) or pointwise


def write_layer(forms: Forms, layer: Layer, flow: Flow) -> str:
    """Write the kernel; returns the name of its node."""
    depthwise = layer.node.op == "DepthwiseConv2dNative"
    value = forms.source.constant(layer.node.input[1])
    assert value is not None
    weight = quantize_weight(value, depthwise)
    source = plain(layer.node.input[0])
    encoding = forms.encoding_of(source)
    signed = encoding.zero_point == SIGNED_ZERO and not pads_nothing(layer.node, value)
    bias = _bias(forms, layer, len(weight.limits))
    if not signed:
        bias = bias - encoding.offset * weight.sums
    call = _Call(forms, layer, weight, source, encoding, signed, bias)
    if layer.node.op == "MatMul":
        return _write_product(call, layer.tail in flow.int8_outputs)
    return _write_convolution(call)


def _bias(forms: Forms, layer: Layer, channels: int) -> Array:
    step = layer.step("BiasAdd")
    if step is None:
        return np.zeros(channels)
    value = forms.source.constant(forms.source.nodes[step.result].input[1])
    assert value is not None
    return value.astype(np.float64)


@dataclass(frozen=True)
class _Call:
    forms: Forms
    layer: Layer
    weight: Weight
    source: str
    encoding: Encoding
    signed: bool
    bias: Array

    def device(self, bias: Array) -> list[tuple[str, tf.DType]]:
        head, forms = self.layer.head, self.forms
        return [
            (forms.stored(self.source, self.signed), S8 if self.signed else U8),
            (forms.constant(f"{head}/weight_int8", self.weight.integers, S8), S8),
            (forms.constant(f"{head}/bias_int8", bias.astype(np.float32)), F32),
        ]

    def host(self) -> list[str]:
        head, forms, limits = self.layer.head, self.forms, self.weight.limits
        return [
            *kernel_limits(forms, self.source, self.encoding, self.signed),
            forms.constant(f"{head}/weight_low", -limits),
            forms.constant(f"{head}/weight_high", limits),
        ]


def kernel_limits(forms: Forms, tensor: str, encoding: Encoding, signed: bool) -> list[str]:
    """The range a kernel that knows no zero point takes a stored tensor to have."""
    low, high = (-127, 127) if signed else (0, 255)
    return [
        forms.scalar(low * encoding.scale, f"{tensor}/least"),
        forms.scalar(high * encoding.scale, f"{tensor}/most"),
    ]


def _write_product(call: _Call, stored: bool) -> str:
    forms, layer = call.forms, call.layer
    device, host = call.device(call.bias), call.host()
    activation = [layer.activation] if layer.activation else []
    if stored:
        encoding = forms.encoding_of(layer.tail)
        host += forms.limits(layer.tail, encoding, False)
        fused = Fused(device, host, ["BiasAdd", *activation, "Requantize"], U8)
        form = UINT8
    else:
        form = BF16 if layer.sixteen and layer.tail not in forms.outputs else FP32
        kind = tf.bfloat16 if form == BF16 else F32
        fused = Fused(device, host, ["BiasAdd", *activation, "Dequantize"], kind)
    name = forms.name_for(layer.tail, form)
    if name == layer.tail or form == UINT8:
        name = name if form != UINT8 else forms.graph.unused(f"{layer.tail}/int8_kernel")
    forms.graph.add(product_node(name, fused))
    forms.put(layer.tail, form, name)
    return name


def _write_convolution(call: _Call) -> str:
    forms, layer = call.forms, call.layer
    result = forms.encoding_of(layer.tail)
    summed = layer.step("Sum")
    # int8 is written only where it is read so, and by itself: a sum in int8 would clip at half
    # its range, and an activation clips at a number of uint8.
    plain_result = summed is None and layer.activation is None
    signed = layer.read_padded and result.zero_point == SIGNED_ZERO and plain_result
    bias = call.bias if signed else call.bias + result.offset
    device_sum, host_sum, steps = [], [], ["BiasAdd"]
    if summed is not None:
        assert summed.other is not None
        added = forms.encoding_of(summed.other)
        bias = bias - added.offset
        device_sum = [(forms.stored(summed.other, False), U8)]
        host_sum = kernel_limits(forms, summed.other, added, False)
        steps.append("Sum")
    clips_at_zero = layer.activation is not None and result.zero_point == 0
    if clips_at_zero or summed is not None:
        # Of numbers stored from 0 on, what lies below is cut off in any case.
        steps.append("Relu")
    host = [*call.host(), *host_sum, *kernel_limits(forms, layer.tail, result, signed)]
    kind = S8 if signed else U8
    fused = Fused([*call.device(bias), *device_sum], host, [*steps, "Requantize"], kind)
    name = forms.graph.unused(f"{layer.tail}/int8_kernel")
    forms.graph.add(convolution_node(name, fused, layer.node))
    clipped = _clipped(forms, layer, name, result, kind)
    forms.put(layer.tail, INT8 if signed else UINT8, clipped)
    return name


def _clipped(forms: Forms, layer: Layer, name: str, result: Encoding, kind: tf.DType) -> str:
    """What the activation cuts off and the range of the stored numbers does not.

    That happens where a tensor shares its scale with others (concatenation), so that its own
    zero, or six, lies within the range.
    """
    limits: Mapping[str, int] = {}
    zero = result.zero_point
    if layer.activation is not None and zero > 0:
        limits = {"Maximum": zero}
    if layer.activation == "Relu6" and round(6 / result.scale) + zero < 255:
        limits = {**limits, "Minimum": round(6 / result.scale) + zero}
    for op, limit in limits.items():
        assert kind is U8  # int8 is written only without an activation
        stem = f"{layer.tail}/{op.lower()}"
        name = forms.bitwise(stem, op, name, np.uint8(limit), (U8, U8))
    return name
