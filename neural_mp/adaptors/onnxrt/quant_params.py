"""Quantization of weights and biases."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.quant_params import MIDDLE, round_to_int8, weight_scales
from neural_mp.adaptors.common.signature import Array
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.quant_spec import QuantSpec

_INT32 = np.iinfo(np.int32)


@dataclass(frozen=True)
class StoredWeight:
    """A quantized weight.

    Attributes:
        integers: the quantized values.
        scales: of every channel, float32.
        zero_points: of every channel, in the dtype of the integers.
        axis: the axis of the channels.
    """

    integers: Array
    scales: Array
    zero_points: Array
    axis: int


def store_weight(
    weight: Array, axis: int, spec: QuantSpec, bias: Array | None = None, input_scale: float = 1.0
) -> StoredWeight:
    """Quantize a weight to 8 bits, symmetric per channel of the output axis `axis`.

    The bias is quantized to int32 with weight scale times input scale; if the weight of a channel
    is too small for the bias to fit, the scale is increased.
    """
    limit = weight_qmax(spec)
    reduced = tuple(i for i in range(weight.ndim) if i != axis)
    scales = weight_scales(weight, reduced, limit)
    if bias is not None:
        least = np.abs(bias).astype(np.float64) / (0.5 * _INT32.max * input_scale)
        scales = np.maximum(scales, least.astype(np.float32).reshape(scales.shape))
    integers: Array = round_to_int8(weight, scales, limit)
    zeros: Array = np.zeros(scales.size, np.int8)
    if spec.dtype == "uint8":
        integers, zeros = unsigned(integers), unsigned(zeros)
    return StoredWeight(integers, scales.reshape(-1), zeros, axis)


def unsigned(integers: Array) -> Array:
    """Return int8 values as uint8, with a zero point of 128."""
    return (integers.astype(np.int16) + MIDDLE).astype(np.uint8)


def store_bias(bias: Array, scales: Array) -> Array:
    """Round a bias to int32, one scale per channel."""
    steps = np.rint(bias.astype(np.float64) / scales.astype(np.float64))
    return np.clip(steps, _INT32.min, _INT32.max).astype(np.int32)
