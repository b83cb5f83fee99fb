"""Nets with a loop that never ends for some inputs."""

import threading

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_nets import graph, op

DRAW = np.random.default_rng(0)
WEIGHTS = {
    "one": DRAW.normal(size=(8, 64)).astype(np.float32) / 3,
    "two": DRAW.normal(size=(64, 4)).astype(np.float32) / 8,
}


def endless_onnx(above: float) -> onnx.ModelProto:
    """A net of [batch, 8] inputs whose loop has no end if one of them is above a number."""
    body = helper.make_graph(
        [op("Identity", "go", "still"), op("Add", "s step", "next")],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("s", TensorProto.FLOAT, ["batch", 4]),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, ["batch", 4]),
        ],
    )
    nodes = [
        op("MatMul", "x one", "a"),
        op("Relu", "a", "b"),
        op("MatMul", "b two", "c"),
        op("ReduceMax", "x", "largest", keepdims=0),
        op("Greater", "largest above", "begins"),
        op("Loop", "- begins c", "y", body=body),
    ]
    constants = {**WEIGHTS, "above": np.array(above, np.float32), "step": np.ones(1, np.float32)}
    return graph(nodes, {"x": ["batch", 8]}, ["y"], constants)


def run_in_thread(function, by_main):
    """Call a function in this thread, or in another one, and wait for its end."""
    if by_main:
        function()
        return
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()
