"""Probe of integer kernels with the largest 8-bit values; runs in a child process."""

from __future__ import annotations

import numpy as np

from neural_mp.adaptors.common.kernels.int8_accumulation import (
    COMMON_CASES,
    Case,
    Convolution,
    probe_accumulation,
)
from neural_mp.adaptors.openvino.runtime import Runner, ops, ov
from neural_mp.errors import ConversionError
from neural_mp.util.pytree import Array


def _sum_products(case: Case, x: Array, weight: Array) -> Array:
    """Return the sums of products of a kernel with uint8 input and int8 weight."""
    parameter = ops.parameter(list(x.shape), np.float32, name="x")
    quantized = ops.fake_quantize(
        parameter, np.float32(0), np.float32(255), np.float32(0), np.float32(255), 256
    )
    if isinstance(case, Convolution):
        zeros, ones = ([value] * (weight.ndim - 2) for value in (0, 1))
        factor = _make_dequantized_weight(
            weight.reshape(case.groups, -1, *weight.shape[1:]), (0, 1)
        )
        if case.groups == 1:
            factor = _make_dequantized_weight(weight, (0,))
        convolution = ops.convolution if case.groups == 1 else ops.group_convolution
        result = convolution(quantized, factor, ones, zeros, zeros, ones)
    else:
        result = ops.matmul(quantized, _make_dequantized_weight(weight, (0,)), False, True)
    model = ov.Model([result], [parameter], "probe")
    return Runner(model)([x.astype(np.float32)])[0]


def _make_dequantized_weight(integers: Array, channels: tuple[int, ...]) -> ov.Node:
    shape = [size if axis in channels else 1 for axis, size in enumerate(integers.shape)]
    scales = ops.constant(np.ones(shape, np.float32))
    return ops.multiply(ops.convert(ops.constant(integers), "f32"), scales)


if __name__ == "__main__":
    probe_accumulation(COMMON_CASES, _sum_products, ConversionError)
