"""Probe of integer kernels with the largest 8-bit values; runs in a child process."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.int8_accumulation import Case, Convolution, probe_accumulation
from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.onnxrt.graph.sessions import CPU
from neural_mp.adaptors.onnxrt.int8_accumulation import CASES
from neural_mp.adaptors.onnxrt.kernels.registry import CONTRIB

_OPSET, _IR_VERSION = 17, 9
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
    graph = helper.make_graph(
        [node],
        "kernel",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", result, None)],
        [numpy_helper.from_array(value, name) for name, value in inputs.items()],
    )
    versions = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)
    session = ort.InferenceSession(model.SerializeToString(), providers=[CPU])
    return np.asarray(session.run(None, {"x": x})[0])


if __name__ == "__main__":
    # The bindings raise their own types.
    probe_accumulation(CASES, _sum_products, Exception)
