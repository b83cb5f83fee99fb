"""Probe of integer kernels with the largest 8-bit values; runs in a child process."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper

from neural_mp.adaptors.common.kernels.int8_accumulation import (
    Case,
    Convolution,
    probe_accumulation,
)
from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.onnxrt.int8_accumulation import CASES
from neural_mp.adaptors.onnxrt.kernels.n_bits import run_kernel
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB

#: The quantized value of a convolution's largest sum.
_STORED = 200


def _sum_products(case: Case, x: Array, weight: Array) -> Array:
    """Return the sums of products of a kernel; a convolution requantizes them to uint8."""
    if isinstance(case, Convolution):
        step = np.float32(255 * 127 * weight[0].size / _STORED)
        node = helper.make_node(
            "QLinearConv",
            ["x", "one", "zero", "w", "steps", "middles", "step", "zero"],
            ["y"],
            group=case.groups,
            kernel_shape=list(weight.shape[2:]),
        )
        return _run_node(node, x, TensorProto.UINT8, weight, step) * np.float64(step)
    names = ["x", "w", "one", "steps", "zero", "middles"]
    node = helper.make_node("MatMulIntegerToFloat", names, ["y"], domain=CONTRIB)
    return _run_node(node, x, TensorProto.FLOAT, weight.T.copy(), np.float32(1))


def _run_node(
    node: onnx.NodeProto, x: Array, result: int, weight: Array, step: np.float32
) -> Array:
    outputs = weight.shape[-1 if node.domain else 0]
    constants = {
        "one": np.float32(1),
        "zero": np.uint8(0),
        "w": weight,
        "steps": np.ones(outputs, np.float32),
        "middles": np.zeros(outputs, np.int8),
        "step": step,
    }
    inputs = {name: np.asarray(value) for name, value in constants.items() if name in node.input}
    return run_kernel(node, x, result, inputs)


if __name__ == "__main__":
    # The bindings raise their own types.
    probe_accumulation(CASES, _sum_products, Exception)
