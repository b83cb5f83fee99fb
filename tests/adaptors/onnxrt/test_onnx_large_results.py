"""Chains of small ops with results that exceed memory are not computed on loading."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx import parser
from onnx_nets import run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.graph.sessions import Runner

ADAPTOR = OnnxRuntimeAdaptor()
X = np.ones((2, 4), np.float32)
#: Nodes that compute `b`, tens of megabytes, by the constants before them.
LARGE = {
    "filled": "<int64[2] d = {8, 16}, int64[2] e = {512, 512}> { m = Mul (d, e) "
    "b = ConstantOfShape (m)",
    "counted": "<int64[3] d = {4096, 4095, 4096}> { m = Unique (d) b = ConstantOfShape (m)",
    "repeated": "<float[2] t = {1.0, 2.0}, int64[1] m = {64}> "
    "{ a = Tile (t, m) c = Tile (a, m) d = Tile (c, m) b = Tile (d, m)",
    "multiplied": "<float s = {0.0}, float l = {4096.0}, float k = {1.0}, int64[1] z = {0}, "
    "int64[1] o = {1}> "
    "{ a = Range (s, l, k) p = Unsqueeze (a, z) q = Unsqueeze (a, o) b = Mul (p, q)",
}


def _model(nodes: str) -> onnx.ModelProto:
    text = f"net (float[n, 4] x) => (float[n, 4] y) {nodes} "
    head = '<ir_version: 10, opset_import: ["" : 20]> '
    return parser.parse_model(f"{head}{text} r = ReduceMax <keepdims = 0> (b) y = Add (x, r) }}")


def _ops(model: Any) -> set[str]:
    return {node.op_type for node in model.program.graph}


@pytest.mark.parametrize(
    "name", ["filled", "counted", pytest.param("repeated", marks=pytest.mark.slow), "multiplied"]
)
def test_constants_with_large_results_are_not_computed_on_loading(name, monkeypatch):
    sizes: list[int] = []
    call = Runner.__call__

    def recorded(self: Runner, feeds: Any, fetches: Any) -> Any:
        outputs = call(self, feeds, fetches)
        sizes.extend(np.asarray(value).nbytes for value in outputs)
        return outputs

    source = _model(LARGE[name])
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "__call__", recorded)
        model = ADAPTOR.load(source)
    assert max(sizes, default=0) < 1 << 20
    assert "ReduceMax" in _ops(model)
    np.testing.assert_array_equal(ADAPTOR.predict(model, X), run(source, x=X)[0])


def test_a_false_declaration_does_not_hide_a_large_result():
    source = _model(LARGE["repeated"])
    for name in "acdb":
        declared = onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [2])
        source.graph.value_info.append(declared)
    assert "ReduceMax" in _ops(ADAPTOR.load(source))


@pytest.mark.parametrize(
    "nodes",
    [
        "<int64[2] d = {1, 2}, int64[2] e = {2, 2}> { m = Mul (d, e) b = ConstantOfShape (m)",
        "<float[2] t = {1.0, 2.0}, int64[1] m = {4}> { b = Tile (t, m)",
    ],
    ids=["product", "repeated"],
)
def test_small_results_are_computed_on_loading(nodes):
    source = _model(nodes)
    model = ADAPTOR.load(source)
    assert _ops(model) == {"Add"}
    np.testing.assert_array_equal(ADAPTOR.predict(model, X), run(source, x=X)[0])
