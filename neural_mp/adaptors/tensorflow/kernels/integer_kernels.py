"""Nodes of the runtime's integer kernels, the range of their weights, and variants of tensors.

All tensors are quantized to uint8 with a zero point, but the kernels support no zero points: to
them a value is `scale · q`, the float value plus `scale · zero_point`. The resulting offset after a
contraction is the same at every position, and is subtracted from the bias.

Inputs are never int8: the kernels keep the weights in a layout that suits their first input, and
for int8 use that layout even if a later input of another size needs another, with wrong results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from neural_mp.adaptors.common.named_graphs import (
    BF16,
    FP16,
    FP32,
    UINT8,
    TensorVariants,
)
from neural_mp.adaptors.common.quant_params import (
    Array,
    IntegerWeight,
    find_saturating_layers,
    kinds_beyond_7_bits,
    round_to_int8,
    weight_scales,
)
from neural_mp.adaptors.tensorflow.graph.ops import INTEGER_KERNELS, LAYERS
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    NodeDef,
    TensorGraph,
    get_node_name,
    make_constant,
    make_node,
    plain_name,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.int8_accumulation import FULL_RANGE, REDUCED_RANGE, WEIGHT_LIMITS, KernelKind
from neural_mp.core.observations import Range
from neural_mp.core.quantization_flow import QuantizationFlow
from neural_mp.errors import ConversionError

F32, U8, S8 = tf.float32, tf.quint8, tf.qint8
#: Integer that the kernels assume for the greatest weight, whatever its actual integer.
FULL = WEIGHT_LIMITS[FULL_RANGE]
#: Attribute of a kernel's node, ignored by TensorFlow: the zero point of the input.
ZERO_POINT = "_neural_mp_zero_point"


@dataclass(frozen=True)
class Weight:
    """A weight in int8, with one scale per output channel.

    Attributes:
        integers: quantized values.
        limits: per channel, the float value of integer 127.
        sums: per channel, the sum of the quantized weights in floats, over all inputs.
    """

    integers: NDArray[np.int8]
    limits: NDArray[np.float32]
    sums: NDArray[np.float64]


def list_summed_axes(rank: int, depthwise: bool) -> tuple[int, ...]:
    """Return the axes of a weight that are not output channels.

    The shape is [..., outputs], or [height, width, inputs, multiplier] if depthwise.
    """
    return (0, 1) if depthwise else tuple(range(rank - 1))


def quantize_weight(
    weight: Array, depthwise: bool, limit: int, scales: Array | None = None
) -> Weight:
    """Round a weight to int8 within ±limit, symmetric per channel; see `list_summed_axes`.

    `scales` have the axes of the weight; default: those that cover the weight.
    """
    if scales is None:
        scales = weight_scales(weight, list_summed_axes(weight.ndim, depthwise), limit)
    integers = round_to_int8(weight, scales, limit)
    limits = scales.reshape(-1) * np.float32(FULL)
    return Weight(integers, limits, sum_channel_values(integers, limits, depthwise))


def sum_channel_values(integers: Array, limits: Array, depthwise: bool) -> NDArray[np.float64]:
    """Return the sum of the float values of every output channel: of two axes if depthwise."""
    axes = list_summed_axes(integers.ndim, depthwise)
    sums = integers.sum(axis=axes, dtype=np.int64).reshape(-1)
    return np.asarray(sums * (limits.astype(np.float64) / FULL))


def quantize_node(name: str, inputs: Sequence[str]) -> NodeDef:
    """Quantize. `inputs`: values, lowest and highest float value of the range."""
    # The kernels of the other modes are oneDNN's, whose setup is repeated on every call.
    return make_node(
        "QuantizeV2",
        name,
        inputs,
        T=U8,
        mode="MIN_COMBINED",
        round_mode="HALF_AWAY_FROM_ZERO",  # the only choice in this mode
        narrow_range=False,
        axis=-1,
        ensure_minimum_range=0.0,
    )


def make_dequantize_node(name: str, inputs: Sequence[str], dtype: tf.DType) -> NodeDef:
    """Dequantize uint8. `inputs`: values, lowest and highest float value of the range."""
    # The kernel of mode SCALED ends the process on empty tensors.
    return make_node(
        "Dequantize",
        name,
        inputs,
        T=U8,
        mode="MIN_COMBINED",
        dtype=dtype,
        narrow_range=False,
        axis=-1,
    )


@dataclass(frozen=True)
class Fused:
    """A call of an integer kernel.

    Attributes:
        device: data tensors with their types: input, weight, bias, and the summand if any.
        host: names of the limits, in the kernel's order.
        steps: ops fused into the kernel.
        result: output type.
    """

    device: Sequence[tuple[str, tf.DType]]
    host: Sequence[str]
    steps: Sequence[str]
    result: tf.DType

    @property
    def input_names(self) -> list[str]:
        """Names of all inputs."""
        return [*(name for name, _ in self.device), *self.host]

    def common_attributes(self) -> Mapping[str, object]:
        """Return the attributes common to all fused kernels."""
        requantizes = self.steps[-1] == "Requantize"
        return {
            "Tdevice_inputs": [kind for _, kind in self.device],
            "Thost_inputs": [F32] * len(self.host),
            "Tdevice_outputs": [self.result],
            "Thost_outputs": [F32, F32] if requantizes else [],
            "fused_ops": list(self.steps),
            "Tbias": F32,
            "is_bias_const": True,
        }


def make_convolution_node(name: str, fused: Fused, like: NodeDef) -> NodeDef:
    """Return a convolution, depthwise or not, with the geometry of the float node `like`."""
    summand = fused.device[3][1] if len(fused.device) > 3 else fused.result
    node = make_node(
        LAYERS[like.op].op,
        name,
        fused.input_names,
        Tinput=fused.device[0][1],
        Tfilter=S8,
        Tsummand=summand,
        out_type=fused.result,
        is_filter_const=True,
        data_format="NHWC",
        alpha=0.0,
        **fused.common_attributes(),
    )
    for key in ("strides", "padding", "explicit_paddings", "dilations"):
        if key in like.attr:
            node.attr[key].CopyFrom(like.attr[key])
    return node


def make_product_node(name: str, fused: Fused) -> NodeDef:
    """Return a dense layer; a uint8 result has a zero point without further ops."""
    return make_node(
        "_QuantizedMatMul",
        name,
        fused.input_names,
        T1=fused.device[0][1],
        T2=S8,
        U=F32,
        Tout=fused.result,
        transpose_a=False,
        transpose_b=False,
        is_weight_const=True,
        input_quant_mode="SCALED",
        output_quant_mode="MIN_FIRST",
        **fused.common_attributes(),
    )


def full_range_kernels(model: TensorFlowModel) -> frozenset[KernelKind]:
    """Return the kinds of integer kernels with weights beyond ±63."""
    return kinds_beyond_7_bits(_iterate_integer_weights(model.graph))


def with_reduced_weights(model: TensorFlowModel) -> TensorFlowModel:
    """Return the model with weights rounded again, to ±63, for kernels that may saturate.

    Raises:
        ConversionError: a kernel does not record its input's zero point, as kernels from other
            programs or earlier versions.
    """
    graph = model.graph.copy_graph()
    for name in find_saturating_layers(_iterate_integer_weights(graph)):
        node = graph.nodes[name]
        if ZERO_POINT not in node.attr:
            raise ConversionError(
                f"the kernel {name!r} does not record the zero point of its input, so its weight "
                f"cannot be rounded again; convert the original model again"
            )
        _reduce_weight_range(graph, node)
    return replace(model, graph=graph)


def _reduce_weight_range(graph: TensorGraph, node: NodeDef) -> None:
    depthwise = INTEGER_KERNELS[node.op] is KernelKind.DEPTHWISE
    weight = _require_constant(graph, node, 1).astype(np.int8)
    first = len(node.attr["Tdevice_inputs"].list.type)  # limits of input, then weight
    input_limit = float(_require_constant(graph, node, first + 1))
    limits = _require_constant(graph, node, first + 3)
    shaped = limits.reshape(weight.shape[2:]) if depthwise else limits
    limit = WEIGHT_LIMITS[REDUCED_RANGE]
    rounded = quantize_weight(weight * (shaped / np.float32(FULL)), depthwise, limit)
    # The offset by the input's zero point was subtracted from the bias, based on the old weights.
    offset = node.attr[ZERO_POINT].i * input_limit / 255
    lost = offset * (sum_channel_values(weight, limits, depthwise) - rounded.sums)
    bias = _require_constant(graph, node, 2).astype(np.float64) + lost
    edited = graph.edit_node(node.name)
    for position, value, kind in (
        (1, rounded.integers, S8),
        (2, bias.astype(np.float32), None),
        (first + 2, -rounded.limits, None),
        (first + 3, rounded.limits, None),
    ):
        name = graph.unused_name(f"{get_node_name(node.input[position])}/reduced")
        edited.input[position] = graph.add_node(make_constant(name, value, kind))


def _require_constant(graph: TensorGraph, node: NodeDef, position: int) -> Array:
    value = graph.find_constant(node.input[position])
    if value is None:
        raise ConversionError(f"input {position} of the kernel {node.name!r} must be constant")
    return value


def _iterate_integer_weights(graph: TensorGraph) -> Iterator[IntegerWeight[str]]:
    for name, node in graph.nodes.items():
        weight = graph.find_constant(node.input[1]) if node.op in INTEGER_KERNELS else None
        if weight is not None:
            kind, integers = INTEGER_KERNELS[node.op], weight.astype(np.int8)
            if kind is KernelKind.DEPTHWISE and integers.shape[3] > 1:
                kind = KernelKind.CONVOLUTION
            yield IntegerWeight(name, kind, integers)


DTYPES = {FP32: tf.float32, BF16: tf.bfloat16, FP16: tf.float16}


class Forms(TensorVariants[str]):
    """Variants of tensors in the graph being written.

    Attributes:
        source: original graph.
        outputs: nodes whose FP32 variant must keep their name.
        graph: graph being written; starts with all nodes of the original, whose names are
            reserved for nodes that keep theirs.
        helpers: added node → the op it implements a part of.
    """

    dequantized_to: ClassVar[tuple[str, ...]] = (FP32, BF16)

    def __init__(
        self,
        source: TensorGraph,
        outputs: frozenset[str],
        flow: QuantizationFlow,
        ranges: Mapping[str, Range],
    ) -> None:
        super().__init__(flow, ranges)
        self.source, self.outputs, self.graph = source, outputs, source.copy_graph()
        self.helpers: dict[str, str] = {}
        self._scalars: dict[float, str] = {}

    def name_of(self, tensor: str) -> str:
        """Return the tensor's own name."""
        return tensor

    def as_float(self, tensor: str, variant: str = FP32) -> str:
        """Return a tensor in FP32, BF16 or FP16, given its name with or without `:0`."""
        return super().as_float(plain_name(tensor), variant)

    def as_uint8(self, tensor: str) -> str:
        """Return a tensor in uint8, given its name with or without `:0`."""
        return super().as_uint8(plain_name(tensor))

    def name_for(self, tensor: str, variant: str) -> str:
        """Return the name of the node with a variant of a tensor."""
        if variant == FP32 and tensor in self.outputs:
            return tensor
        return self.graph.unused_name(f"{tensor.replace(':', '/result_')}/{variant}")

    def scalar_constant(self, value: float, name: str) -> str:
        """Return a scalar constant, shared by all nodes that need the value."""
        value = float(np.float32(value))
        if value not in self._scalars:
            self._scalars[value] = self.graph.put_constant(name, np.float32(value))
        return self._scalars[value]

    def get_constant_value(self, tensor: str) -> Array | None:
        """Return the value of a Const; None for a computed tensor."""
        return self.source.find_constant(tensor)

    def insert_16_bit_constant(self, tensor: str, variant: str, values: Array) -> str:
        """Add a Const."""
        return self.graph.put_constant(
            f"{get_node_name(tensor)}/{variant}", values, DTYPES[variant]
        )

    def insert_cast(self, tensor: str, source: str, variant: str) -> str:
        """Add a Cast."""
        self.count_conversion("casts")
        types = {"SrcT": DTYPES[source], "DstT": DTYPES[variant]}
        inputs = [self.as_float(tensor, source)]
        name = self.name_for(tensor, variant)
        return self.graph.add_node(make_node("Cast", name, inputs, **types, Truncate=False))

    def insert_quantize(self, tensor: str, real: str) -> str:
        """Add a QuantizeV2."""
        return self.quantize_with_scale_of(real, tensor, self.name_for(tensor, UINT8))

    def insert_dequantize(self, tensor: str, variant: str) -> str:
        """Add a Dequantize."""
        self.count_conversion("dequantize")
        inputs = [self.as_uint8(tensor), *self.range_constants(tensor)]
        return self.graph.add_node(
            make_dequantize_node(self.name_for(tensor, variant), inputs, DTYPES[variant])
        )

    def quantize_with_scale_of(self, real: str, tensor: str, name: str) -> str:
        """Quantize an FP32 tensor of the graph being written with the scale of `tensor`."""
        self.count_conversion("quantize")
        return self.graph.add_node(quantize_node(name, [real, *self.range_constants(tensor)]))

    def range_constants(self, tensor: str) -> list[str]:
        """Return the range for a quantize or dequantize node."""
        encoding, stem = self.get_quant_params(tensor), get_node_name(tensor)
        return [
            self.scalar_constant(encoding.low, f"{stem}/low"),
            self.scalar_constant(encoding.high, f"{stem}/high"),
        ]

    def cast_to_uint8(self, stored: str, name: str) -> str:
        """Cast quantized values to plain uint8, which all ops that move values support."""
        return self.graph.put_node("Bitcast", f"{name}/bits", [stored], T=U8, type=tf.uint8)

    def clip_quantized(self, name: str, op: str, stored: str, limit: int) -> str:
        """Apply `Minimum` or `Maximum`, which lack quantized kernels, to a quantized tensor."""
        constant = self.graph.put_constant(f"{name}/limit", np.uint8(limit))
        inputs = [self.cast_to_uint8(stored, name), constant]
        changed = self.graph.put_node(op, f"{name}/{op}", inputs, T=tf.uint8)
        return self.graph.put_node("Bitcast", name, [changed], T=tf.uint8, type=U8)
