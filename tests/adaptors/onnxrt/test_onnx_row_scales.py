"""Dynamic INT8 in ONNX Runtime: every row has a scale of its own."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from neural_mp import PrecisionPlan, convert_with_plan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec

DYNAMIC = OpConfig(
    Precision.INT8,
    QuantSpec.parse("int8 symmetric per_channel"),
    QuantSpec.parse("uint8 asymmetric per_tensor dynamic"),
)
DRAW = np.random.default_rng(0)
WEIGHT = (DRAW.standard_normal((64, 48)) / 8).astype(np.float32)
BIAS = DRAW.standard_normal(48).astype(np.float32)


def _model(opset: int, with_bias: bool) -> onnx.ModelProto:
    """Return two products of the same inputs [batch, rows, 64], one with a bias."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["first" if with_bias else "y"], "first"),
        helper.make_node("MatMul", ["x", "w"], ["z"], "second"),
    ]
    if with_bias:
        nodes.insert(1, helper.make_node("Add", ["first", "b"], ["y"], "add"))
    constants = [numpy_helper.from_array(WEIGHT, "w"), numpy_helper.from_array(BIAS, "b")]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", "r", 64])]
    outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", "r", 48]) for name in "yz"
    ]
    graph = helper.make_graph(
        nodes, "net", inputs, outputs, constants if with_bias else constants[:1]
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=9)


@pytest.mark.parametrize("opset", [13, 17, 18, 20])
@pytest.mark.parametrize("with_bias", [True, False])
def test_rows_do_not_depend_on_a_row_with_outliers(opset, with_bias):
    rows = DRAW.standard_normal((2, 6, 64)).astype(np.float32)
    loud = rows.copy()
    loud[0, 0] *= 1000
    loud[1, 5] = 0
    plan = PrecisionPlan({"first": DYNAMIC, "second": DYNAMIC})
    result = convert_with_plan(_model(opset, with_bias), plan)
    audit = result.audit()
    assert audit.holds
    assert set(audit.input_scales.values()) == {"row"}
    assert "2 ops in dynamic int8: a scale for each row of the inputs" in str(audit)
    quiet, among = result({"x": rows}), result({"x": loud})
    right = loud @ WEIGHT + (BIAS if with_bias else 0)
    for first, second in zip(quiet, among, strict=True):
        np.testing.assert_allclose(second[0, 1:], first[0, 1:], rtol=1e-5, atol=1e-5)
    outputs = among[0]
    errors = np.linalg.norm(outputs - right, axis=-1) / np.linalg.norm(right + 1e-9, axis=-1)
    assert errors[:, :5].max() < 0.02
    np.testing.assert_array_equal(outputs[1, 5], BIAS if with_bias else np.zeros(48))
