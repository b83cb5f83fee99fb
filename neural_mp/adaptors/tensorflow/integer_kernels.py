"""The integer kernels of the runtime: how their nodes are written.

Everything is stored as uint8 with a zero point. The kernels know none: to them the stored numbers
are `scale · q`, which is the real value plus `scale · zero_point`. What that adds behind a product
is the same for every position, and is taken out of the bias.

Nothing is ever read as int8: the kernels keep the weights in the order that suits the first input
they meet, and for int8 they go on with that order when a later input of another size wants another,
which gives wrong numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.adaptors.tensorflow.tensor_graph import Array, NodeDef, make_node
from neural_mp.core.int8_accumulation import FULL_RANGE, WEIGHT_LIMITS

F32, U8, S8 = tf.float32, tf.quint8, tf.qint8
#: The integer that the kernels take the greatest weight to be stored as, whatever it is stored as.
FULL = WEIGHT_LIMITS[FULL_RANGE]
#: Attribute of a kernel's node that TensorFlow leaves alone: what zero is stored as in its input.
ZERO_POINT = "_neural_mp_zero_point"


@dataclass(frozen=True)
class Weight:
    """A weight in int8, one scale per output channel.

    Attributes:
        integers: as stored.
        limits: of every channel, the real value that 127 stands for.
        sums: of every channel, the sum of its real values as stored, over all inputs.
    """

    integers: NDArray[np.int8]
    limits: NDArray[np.float32]
    sums: NDArray[np.float64]


def quantize_weight(weight: Array, depthwise: bool, limit: int) -> Weight:
    """Round a weight to int8, symmetric per channel.

    Args:
        weight: shape [..., outputs], or [height, width, inputs, multiplier] of a depthwise
            convolution.
        depthwise: which of the two.
        limit: the largest integer, 127 or 63.
    """
    axes = (0, 1) if depthwise else tuple(range(weight.ndim - 1))
    scales = weight_scales(weight, axes, limit)
    integers = round_to_int8(weight, scales, limit)
    limits = scales.reshape(-1) * np.float32(FULL)
    return Weight(integers, limits, real_sums(integers, limits, depthwise))


def real_sums(integers: Array, limits: Array, depthwise: bool) -> NDArray[np.float64]:
    """The sum of the real values of every output channel.

    Args:
        integers: as stored.
        limits: the real value that 127 stands for, of every channel.
        depthwise: whether the channels are the last two axes.
    """
    axes = (0, 1) if depthwise else tuple(range(integers.ndim - 1))
    sums = integers.sum(axis=axes, dtype=np.int64).reshape(-1)
    return np.asarray(sums * (limits.astype(np.float64) / FULL))


def quantize_node(name: str, inputs: Sequence[str]) -> NodeDef:
    """Real to stored. `inputs`: values, lowest and highest real number stored."""
    # The kernels of the other modes are oneDNN's, which set themselves up anew on every call.
    return make_node(
        "QuantizeV2",
        name,
        inputs,
        T=U8,
        mode="MIN_COMBINED",
        round_mode="HALF_AWAY_FROM_ZERO",  # the only one this mode has
        narrow_range=False,
        axis=-1,
        ensure_minimum_range=0.0,
    )


def dequantize_node(name: str, inputs: Sequence[str], dtype: tf.DType) -> NodeDef:
    """Stored as uint8 to real. `inputs`: values, lowest and highest real number stored."""
    # The kernel of the mode SCALED ends the process when it meets a tensor without elements.
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
    """One call of an integer kernel.

    Attributes:
        device: data tensors with their types: input, weight, bias, and a summand if there is one.
        host: names of the limits, in the order the kernel takes them.
        steps: what the kernel does behind the product.
        result: the type it writes.
    """

    device: Sequence[tuple[str, tf.DType]]
    host: Sequence[str]
    steps: Sequence[str]
    result: tf.DType

    @property
    def inputs(self) -> list[str]:
        """Names of all inputs."""
        return [*(name for name, _ in self.device), *self.host]

    def common(self) -> Mapping[str, object]:
        """The attributes all fused kernels have in common."""
        requantizes = self.steps[-1] == "Requantize"
        return {
            "Tdevice_inputs": [kind for _, kind in self.device],
            "Thost_inputs": [F32] * len(self.host),
            "Tdevice_outputs": [self.result],
            "Thost_outputs": [F32, F32] if requantizes else [],
            "fused_ops": list(self.steps),
        }


def convolution_node(name: str, fused: Fused, like: NodeDef) -> NodeDef:
    """A convolution, depthwise or not, with the geometry of the float node `like`."""
    summand = fused.device[3][1] if len(fused.device) > 3 else fused.result
    depthwise = like.op == "DepthwiseConv2dNative"
    node = make_node(
        "_FusedQuantizedDepthwiseConv2D" if depthwise else "_FusedQuantizedConv2D",
        name,
        fused.inputs,
        Tinput=fused.device[0][1],
        Tfilter=S8,
        Tbias=F32,
        Tsummand=summand,
        out_type=fused.result,
        is_filter_const=True,
        is_bias_const=True,
        data_format="NHWC",
        alpha=0.0,
        **fused.common(),
    )
    for key in ("strides", "padding", "explicit_paddings", "dilations"):
        if key in like.attr:
            node.attr[key].CopyFrom(like.attr[key])
    return node


def product_node(name: str, fused: Fused) -> NodeDef:
    """A dense layer; it writes uint8 with a zero point by itself."""
    return make_node(
        "_QuantizedMatMul",
        name,
        fused.inputs,
        T1=fused.device[0][1],
        T2=S8,
        Tbias=F32,
        U=F32,
        Tout=fused.result,
        transpose_a=False,
        transpose_b=False,
        is_weight_const=True,
        is_bias_const=True,
        input_quant_mode="SCALED",
        output_quant_mode="MIN_FIRST",
        **fused.common(),
    )
