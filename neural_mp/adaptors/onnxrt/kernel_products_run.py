"""Run in a child process: integer kernels with the largest bytes, against whole numbers."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from neural_mp.adaptors.common.integer_encoding import Array
from neural_mp.adaptors.common.kernel_products import largest_bytes
from neural_mp.adaptors.common.kernel_trials import say_found, say_starts, untried
from neural_mp.adaptors.onnxrt.kernel_products import CONVOLUTIONS, PRODUCTS
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB
from neural_mp.adaptors.onnxrt.sessions import CPU

logger = logging.getLogger(__name__)

_SIDE, _OPSET, _IR_VERSION = 11, 17, 9
_ONE, _ZERO = np.float32(1), np.uint8(0)


def main() -> None:
    """Say of every case whether its kernel is exact."""
    for case in untried((*CONVOLUTIONS, *PRODUCTS)):
        say_starts(case)
        try:
            if case in CONVOLUTIONS:
                exact = _exact_convolution(*CONVOLUTIONS[case])
            else:
                exact = _exact_product(*PRODUCTS[case])
        except Exception:
            # The bindings raise types of their own. What is refused gives no wrong numbers.
            logger.info("%s is refused", case, exc_info=True)
            exact = True
        if exact:
            say_found(case)


def _exact_convolution(inputs: int, outputs: int, groups: int, window: int) -> bool:
    weight_shape = (outputs, inputs // groups, window, window)
    x, weight = largest_bytes((2, inputs, _SIDE, _SIDE), weight_shape)
    # All positions are alike: every one holds the sum of the products of a whole window.
    whole = 255 * 127 * (inputs // groups) * window**2
    node = helper.make_node(
        "QLinearConv",
        ["x", "one", "zero", "w", "steps", "middles", "step", "zero"],
        ["y"],
        group=groups,
        kernel_shape=[window, window],
    )
    found = _run(node, x, TensorProto.UINT8, **_constants(weight, outputs, np.float32(whole / 200)))
    return bool((found == 200).all())


def _exact_product(rows: int, inputs: int, outputs: int) -> bool:
    x, weight = largest_bytes((rows, inputs), (inputs, outputs))
    names = ["x", "w", "one", "steps", "zero", "middles"]
    node = helper.make_node("MatMulIntegerToFloat", names, ["y"], domain=CONTRIB)
    found = _run(node, x, TensorProto.FLOAT, **_constants(weight, outputs, _ONE))
    return bool((found == np.float32(255 * 127 * inputs)).all())


def _constants(weight: Array, outputs: int, step: np.float32) -> dict[str, Any]:
    return {
        "one": _ONE,
        "zero": _ZERO,
        "w": weight,
        "steps": np.ones(outputs, np.float32),
        "middles": np.zeros(outputs, np.int8),
        "step": step,
    }


def _run(node: onnx.NodeProto, x: Array, result: int, **constants: Any) -> Array:
    graph = helper.make_graph(
        [node],
        "kernel",
        [helper.make_tensor_value_info("x", TensorProto.UINT8, x.shape)],
        [helper.make_tensor_value_info("y", result, None)],
        [
            numpy_helper.from_array(np.asarray(v), k)
            for k, v in constants.items()
            if k in node.input
        ],
    )
    versions = [helper.make_opsetid("", _OPSET), helper.make_opsetid(CONTRIB, 1)]
    model = helper.make_model(graph, opset_imports=versions, ir_version=_IR_VERSION)
    session = ort.InferenceSession(model.SerializeToString(), providers=[CPU])
    return np.asarray(session.run(None, {"x": x})[0])


if __name__ == "__main__":
    main()
