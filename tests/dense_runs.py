"""A small dense ONNX net with data and a tuning file in a folder, for tests of the command."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

FEATURES, CLASSES, SAMPLES = 16, 4, 200
CONF = """
model: {name: net.onnx, runtime: source}
mixed_precision: {precisions: int8}
tuning:
  objective: modelsize  # so small a net need not be faster in INT8
  accuracy_criterion: {relative: 0.05}
evaluation:
  accuracy:
    metric: accuracy
    dataloader: {batch_size: 50, dataset: {numpy: {path: test.npz}}}
"""


def dense_net(element: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """[batch, 16] → 4 scores, by two dense layers."""
    random = np.random.default_rng(0)
    kind = helper.tensor_dtype_to_np_dtype(element)
    weights = [
        numpy_helper.from_array(random.normal(size=shape).astype(kind), name)
        for name, shape in (("w1", (FEATURES, 32)), ("w2", (32, CLASSES)))
    ]
    nodes = [
        helper.make_node("MatMul", ["x", "w1"], ["h"], "first"),
        helper.make_node("Relu", ["h"], ["r"], "relu"),
        helper.make_node("MatMul", ["r", "w2"], ["y"], "head"),
    ]
    inputs = [helper.make_tensor_value_info("x", element, ["batch", FEATURES])]
    outputs = [helper.make_tensor_value_info("y", element, ["batch", CLASSES])]
    graph = helper.make_graph(nodes, "dense", inputs, outputs, weights)
    opset = helper.make_opsetid("", 20)
    return helper.make_model(graph, opset_imports=[opset], ir_version=10)


def scores(x: np.ndarray) -> np.ndarray:
    """The net in numpy."""
    w1, w2 = (numpy_helper.to_array(weight) for weight in dense_net().graph.initializer)
    return np.maximum(x @ w1, 0) @ w2


def write_workplace(folder: Path, shift: int = 0) -> Path:
    """Write net, data and tuning file; the labels are right if `shift` is 0."""
    x = np.random.default_rng(1).normal(size=(SAMPLES, FEATURES)).astype("float32")
    labels = (scores(x).argmax(1) + shift) % CLASSES
    np.savez(folder / "test.npz", inputs=x, labels=labels)
    onnx.save(dense_net(), folder / "net.onnx")
    (folder / "conf.yaml").write_text(CONF)
    return folder
