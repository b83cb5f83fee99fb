"""How weights and biases are stored as integers."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.adaptors.common.signature import Array
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.precision import QuantSpec

#: What zero is stored as where weights are unsigned.
_MIDDLE = 128
_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class StoredWeight:
    """A weight in bytes.

    Attributes:
        integers: as stored.
        scales: of every channel, float32.
        zero_points: of every channel, of the type of the integers.
        axis: the axis of the channels.
    """

    integers: Array
    scales: Array
    zero_points: Array
    axis: int


def store_weight(
    weight: Array, axis: int, spec: QuantSpec, bias: Array | None = None, input_scale: float = 1.0
) -> StoredWeight:
    """Round a weight to bytes, symmetric per channel.

    Args:
        weight: the weight.
        axis: the axis of its output channels.
        spec: the type of the bytes.
        bias: what is stored in int32 with the product of this weight's and the input's scale; of
            channels with so small a weight that it would not fit, the scale is made larger.
        input_scale: the scale of the input.
    """
    limit = weight_qmax(spec)
    others = tuple(i for i in range(weight.ndim) if i != axis)
    scales = weight_scales(weight, others, limit)
    if bias is not None:
        least = np.abs(bias).astype(np.float64) / (0.5 * _INT32.max * input_scale)
        scales = np.maximum(scales, least.astype(np.float32).reshape(scales.shape))
    integers: Array = round_to_int8(weight, scales, limit)
    zeros: Array = np.zeros(scales.size, np.int8)
    if spec.dtype == "uint8":
        integers, zeros = unsigned(integers), unsigned(zeros)
    return StoredWeight(integers, scales.reshape(-1), zeros, axis)


def unsigned(integers: Array) -> Array:
    """What is stored in int8, in uint8: the same numbers with another zero point."""
    return (integers.astype(np.int16) + _MIDDLE).astype(np.uint8)


def store_bias(bias: Array, scales: Array) -> Array:
    """Round a bias to int32, one scale a channel."""
    steps = np.rint(bias.astype(np.float64) / scales.astype(np.float64))
    return np.clip(steps, _INT32.min, _INT32.max).astype(np.int32)
