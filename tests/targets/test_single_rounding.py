"""Sums and limits that compilers fuse into the op before are rounded once, as written."""

import numpy as np
import pytest
from onnx import numpy_helper
from onnx_nets import graph, op, run
from qdq_models import emulated
from test_qdq_models import Planned, saved

from neural_mp.adaptors.onnxrt.targets.audit.file_audit import simulate_file
from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import audit_by_qnn
from neural_mp.targets import load_profile

TOKENS, WIDTH, COLUMNS = 5, 16, 8
DRAW = np.random.default_rng(3)
X = DRAW.normal(size=(4, TOKENS, WIDTH)).astype(np.float32)
WEIGHT = DRAW.normal(size=(WIDTH, COLUMNS)).astype(np.float32)
BIAS = (4 * DRAW.normal(size=COLUMNS)).astype(np.float32)


def layer(shape=("n", TOKENS, WIDTH), bias=BIAS, outputs=("y",)):
    """A product with a weight, and the sum with a bias, as exporters write a linear layer."""
    nodes = [op("MatMul", "x w", "product"), op("Add", "b product", "y")]
    return graph(nodes, {"x": list(shape)}, list(outputs), {"w": WEIGHT, "b": bias}, opset=21)


def kinds(planned):
    return [node.op_type for node in planned.held.program.graph]


@pytest.mark.parametrize(
    ("x", "shape", "expected"),
    [
        (X, ("n", TOKENS, WIDTH), ["Reshape", "Gemm", "Reshape"]),
        (X, (4, TOKENS, WIDTH), ["Reshape", "Gemm", "Reshape"]),
        (X[:, 0], ("n", WIDTH), ["Gemm"]),
    ],
)
def test_product_and_bias_become_one_op(x, shape, expected):
    net = layer(shape)
    planned = Planned(net, "qnn", [x])
    assert kinds(planned) == expected
    (y,) = run(net, x=x)
    np.testing.assert_allclose(planned.adaptor.predict(planned.held, x), y, atol=1e-5)
    assert planned.sqnr({}, x) > 40


@pytest.mark.parametrize(
    "net",
    [
        layer(("n", "tokens", WIDTH)),  # a Reshape finds one size only
        layer(bias=DRAW.normal(size=(TOKENS, COLUMNS)).astype(np.float32)),
        layer(bias=np.float32(2)),
        layer(outputs=("product", "y")),
    ],
    ids=["two free sizes", "matrix", "number", "read twice"],
)
def test_other_sums_stay(net):
    planned = Planned(net, "qnn", [X])
    assert kinds(planned) == ["MatMul", "Add"]


def test_other_targets_keep_the_product():
    assert kinds(Planned(layer(), "tensorrt", [X])) == ["MatMul", "Add"]


def limited(kind):
    constants = {"w": WEIGHT, "b": BIAS, "low": np.float32(-1), "high": np.float32(6)}
    nodes = [
        op("Gemm", "x w b", "sum"),
        op("Relu", "sum", "y") if kind == "Relu" else op("Clip", "sum low high", "y"),
    ]
    return graph(nodes, {"x": ["n", WIDTH]}, ["y"], constants, opset=21)


@pytest.mark.parametrize(("kind", "low", "high"), [("Relu", 0, np.inf), ("Clip", -1, 6)])
def test_result_that_only_a_limit_reads_has_the_grid_of_the_limit(kind, low, high, tmp_path):
    """All steps of 8 bits cover what the limit lets through, and the limit rounds nothing."""
    x = X.reshape(-1, WIDTH)
    planned = Planned(limited(kind), "qnn", [x])
    held = planned.converted()
    model = saved(planned, held, tmp_path)
    constants = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    grids = [
        tuple(float(constants[name]) for name in node.input[1:])
        for node in model.graph.node
        if node.op_type == "QuantizeLinear"
    ]
    y = np.clip(x @ WEIGHT + BIAS, low, high)
    assert grids[-1] == grids[-2]
    assert grids[-1][0] == pytest.approx((y.max() - min(y.min(), 0)) / 255, rel=1e-3)


@emulated
@pytest.mark.parametrize(
    ("net", "x"), [(layer(), X), (limited("Relu"), X[:, 0])], ids=["bias", "Relu"]
)
def test_single_rounding_is_that_of_the_emulated_npu(net, x, tmp_path):
    planned = Planned(net, "qnn", [x])
    model, feeds = saved(planned, planned.converted(), tmp_path), [{"x": x[:1]}]
    audit = audit_by_qnn(model, load_profile("qnn"), feeds, simulate_file(model, feeds))
    assert audit.holds, audit.findings
    assert audit.sqnr_db > 35
