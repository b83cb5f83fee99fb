"""A net of ONNX with a table, products and a Gemm, its weights, and plans as plain text."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from neural_mp import PrecisionPlan

WORDS, WIDTH, HIDDEN = 50, 96, 64
GENERATOR = np.random.default_rng(0)
IDS = GENERATOR.integers(0, WORDS, (4, 8))


def draw(*shape):
    return (GENERATOR.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)


WEIGHTS = {
    "table": draw(WORDS, WIDTH),
    "w_up": draw(WIDTH, HIDDEN),
    "b_up": draw(HIDDEN),
    "w_down": draw(40, HIDDEN),
    "b_down": draw(40),
    "w_head": draw(40, WORDS),
}


def words(**weights: np.ndarray) -> onnx.ModelProto:
    """A table, a product with a bias behind it, a Gemm with factors and a head."""
    node = helper.make_node
    nodes = [
        node("Gather", ["table", "ids"], ["e"], name="embed"),
        node("MatMul", ["e", "w_up"], ["u"], name="up"),
        node("Add", ["u", "b_up"], ["v"], name="bias"),
        node("Relu", ["v"], ["r"], name="act"),
        node("Reshape", ["r", "rows"], ["f"], name="flatten"),
        node("Gemm", ["f", "w_down", "b_down"], ["d"], name="down", transB=1, alpha=0.5, beta=2.0),
        node("MatMul", ["d", "w_head"], ["logits"], name="head"),
    ]
    constants = {**WEIGHTS, **weights, "rows": np.array([-1, HIDDEN], np.int64)}
    graph = helper.make_graph(
        nodes,
        "words",
        [helper.make_tensor_value_info("ids", TensorProto.INT64, ["batch", "length"])],
        [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["rows", WORDS])],
        [numpy_helper.from_array(value, name) for name, value in constants.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def plan_of(entries: dict[str, tuple[str, str]]) -> PrecisionPlan:
    return PrecisionPlan.from_dict(
        {op: {"precision": precision, "weight": spec} for op, (precision, spec) in entries.items()}
    )
