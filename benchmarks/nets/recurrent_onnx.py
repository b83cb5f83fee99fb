"""Recurrent layers, and cells and nets in bodies of control flow, as ONNX models with inputs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

HIDDEN, STEPS = 256, 32
_GATES = {"LSTM": 4, "GRU": 3}
Made = tuple[onnx.ModelProto, dict[str, np.ndarray]]


def _drawn(*shape: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def _info(name: str, shape: Any = None, kind: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    nodes: list[onnx.NodeProto], inputs: list[Any], output: str, weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    initializers = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph(nodes, "graph", inputs, [_info(output)], initializers)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def layer(kind: str, batch: int, directions: int = 1, **attributes: Any) -> Made:
    """One recurrent layer of ONNX's own."""
    rows, scale = _GATES[kind] * HIDDEN, HIDDEN**-0.5
    weights = {
        "w": _drawn(directions, rows, HIDDEN, seed=1) * scale,
        "r": _drawn(directions, rows, HIDDEN, seed=2) * scale,
        "b": _drawn(directions, 2 * rows, seed=3) * scale,
    }
    if directions == 2:
        attributes["direction"] = "bidirectional"
    node = helper.make_node(
        kind, ["x", "w", "r", "b"], ["y"], name="layer", hidden_size=HIDDEN, **attributes
    )
    inputs = [_info("x", [STEPS, "batch", HIDDEN])]
    return _model([node], inputs, "y", weights), {"x": _drawn(STEPS, batch, HIDDEN, seed=4)}


def scan(batch: int) -> Made:
    """An Elman cell whose recurrent product lies in the body of a Scan."""
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["s", "w"], ["p"], name="product"),
            helper.make_node("Add", ["p", "x"], ["a"], name="sum"),
            helper.make_node("Tanh", ["a"], ["t"], name="tanh"),
            helper.make_node("Identity", ["t"], ["o"], name="out"),
        ],
        "body",
        [_info("s", [batch, HIDDEN]), _info("x", [batch, HIDDEN])],
        [_info("t", [batch, HIDDEN]), _info("o", [batch, HIDDEN])],
    )
    node = helper.make_node(
        "Scan", ["start", "given"], ["last", "y"], name="scan", body=body, num_scan_inputs=1
    )
    weights = {
        "w": _drawn(HIDDEN, HIDDEN, seed=1) * HIDDEN**-0.5,
        "start": np.zeros((batch, HIDDEN), np.float32),
    }
    inputs = [_info("given", [STEPS, batch, HIDDEN])]
    return _model([node], inputs, "y", weights), {"given": _drawn(STEPS, batch, HIDDEN, seed=4)}


def branch(batch: int) -> Made:
    """Two convolutions in either branch of an If, told by an input which is taken."""
    channels = 64
    weights = {
        f"{name}{position}": _drawn(channels, channels, 3, 3, seed=position) / 24
        for name in ("v", "w")
        for position in (0, 1)
    }

    def net(name: str) -> onnx.GraphProto:
        nodes = [
            helper.make_node("Conv", ["x", f"{name}0"], ["a"], name="first", pads=[1] * 4),
            helper.make_node("Relu", ["a"], ["b"], name="relu"),
            helper.make_node("Conv", ["b", f"{name}1"], ["c"], name="second", pads=[1] * 4),
        ]
        return helper.make_graph(nodes, name, [], [_info("c")])

    node = helper.make_node(
        "If", ["chosen"], ["y"], name="either", then_branch=net("v"), else_branch=net("w")
    )
    inputs = [_info("x", ["batch", channels, 16, 16]), _info("chosen", [], TensorProto.BOOL)]
    feeds = {"x": _drawn(batch, channels, 16, 16, seed=4), "chosen": np.array(True)}
    return _model([node], inputs, "y", weights), feeds


#: What it is → makes it with inputs of a batch size.
LAYERS: dict[str, Callable[[int], Made]] = {
    "lstm": partial(layer, "LSTM"),
    "lstm bidirectional": partial(layer, "LSTM", directions=2),
    "gru": partial(layer, "GRU"),
    "gru, linear before reset": partial(layer, "GRU", linear_before_reset=1),
    "gru bidirectional": partial(layer, "GRU", directions=2),
}
MODELS: dict[str, Callable[[int], Made]] = {
    **LAYERS,
    "scan cell": scan,
    "convolutions in an if": branch,
}
