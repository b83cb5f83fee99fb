"""Weights of 4 bits beside activations of 16: files, numbers, plans, the search and the NPU."""

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import numpy_helper
from onnx_nets import graph, op
from qdq_models import emulated
from test_qdq_models import Planned, saved
from test_widening import A16, W8, chain, cost, words

from neural_mp.adaptors.onnxrt.targets.audit.qnn_audit import audit_by_qnn
from neural_mp.adaptors.onnxrt.targets.audit.structural_audit import Rule, check_structure
from neural_mp.core.observations import WidthFigures
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import FP32, OpConfig, Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError
from neural_mp.search.widening import trace_widening_path
from neural_mp.targets import Widths, load_profile

QNN = load_profile("qnn")
W4 = QuantSpec("int4", "symmetric", "per_channel")
NARROW = OpConfig(Precision.INT16, W4, A16)


@pytest.fixture(scope="module")
def planned():
    """A convolution, a product with a bias and one without, all in w4a16."""
    draw = np.random.default_rng(3)
    shapes = {"k": (8, 3, 3, 3), "kb": (8,), "w": (32, 6), "b": (6,), "v": (6, 5)}
    weights = {name: draw.normal(size=s).astype(np.float32) for name, s in shapes.items()}
    nodes = [
        op("Conv", "x k kb", "c", strides=[2, 2]),
        op("Flatten", "c", "f"),
        op("Gemm", "f w b", "g"),
        op("MatMul", "g v", "y"),
    ]
    net = graph(nodes, {"x": ["batch", 3, 5, 5]}, ["y"], weights, opset=21)
    data = [draw.normal(size=(4, 3, 5, 5)).astype(np.float32) for _ in range(2)]
    return Planned(net, "qnn", data), data, weights


def narrow_plan(planned):
    """Op → its config in w4a16."""
    return {
        op: next(c for c in planned.space.choices(op) if Widths.from_config(c) is Widths.W4A16)
        for op in planned.space.tunable_ops
    }


def test_weights_are_the_nearest_of_fifteen_values_in_each_channel(planned, tmp_path):
    """By a computation of the test's own; activations of 16 bits add little noise."""
    model, data, weights = planned
    held = model.converted(narrow_plan(model))

    def rounded(weight, axes):
        scale = np.abs(weight).max(axis=axes, keepdims=True) / 7
        return np.rint(weight / scale) * scale

    x = data[0]
    patches = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))[:, :, ::2, ::2]
    c = np.einsum("nchwij,ocij->nohw", patches, rounded(weights["k"], (1, 2, 3)))
    c = c + weights["kb"][:, None, None]
    g = c.reshape(len(x), -1) @ rounded(weights["w"], 0) + weights["b"]
    expected = g @ rounded(weights["v"], 0)
    y = model.adaptor.predict(held, x)
    noise = 10 * np.log10(np.square(expected).sum() / np.square(y - expected).sum())
    assert noise > 60

    file = saved(model, held, tmp_path)
    stored = [t for t in file.graph.initializer if t.data_type == onnx.TensorProto.INT4]
    assert sorted(t.dims[0] * t.dims[1] for t in stored if len(t.dims) > 1) == [24, 30, 192]
    assert all(abs(numpy_helper.to_array(t).astype(int)).max() <= 7 for t in stored)
    assert not check_structure(file, QNN)


def test_profile_without_them_refuses_the_file(planned, tmp_path):
    model, _, _ = planned
    file = saved(model, model.converted(narrow_plan(model)), tmp_path)
    others = replace(
        QNN,
        weight=replace(QNN.weight, types=QNN.weight.types[:2]),
        ops={kind: tuple(w for w in own if w.weight_bits != 4) for kind, own in QNN.ops.items()},
    )
    rules = [(finding.op_type, finding.rule) for finding in check_structure(file, others)]
    layers = ("Conv", "Gemm", "MatMul")
    assert sorted(rules) == sorted((kind, rule) for kind in layers for rule in BROKEN)


BROKEN = (Rule.TYPE, Rule.WIDTH)


def test_plan_keeps_them_through_a_file(planned):
    model, _, _ = planned
    plan = PrecisionPlan(narrow_plan(model))
    assert PrecisionPlan.from_dict(plan.to_dict()) == plan


def test_ops_of_cpus_have_four_bits_in_groups_only():
    assert Widths.from_config(NARROW) is Widths.W4A16
    with pytest.raises(PlanError, match="int4 must be per_group, got per_channel"):
        OpConfig(Precision.INT4, W4)
    with pytest.raises(PlanError, match="int8 must have 8 bits, got 4"):
        OpConfig(Precision.INT8, W4, replace(A16, dtype="uint8"))


def test_search_leaves_widths_out_that_cost_as_much_as_wider_ones():
    assert not QNN.is_searched("Conv", Widths.W4A16)
    assert all(QNN.is_searched("Conv", w) for w in (Widths.W8A8, Widths.W8A16, Widths.W16A16))
    assert QNN.is_searched("MatMul", Widths.A8), "a product of two activations"
    assert QNN.is_searched("MatMul", Widths.A16)
    costs = {**QNN.cost.macs, Widths.W4A16: 1.5}
    cheaper = replace(QNN, cost=replace(QNN.cost, macs=costs))
    assert cheaper.is_searched("Conv", Widths.W4A16)


def test_search_of_a_board_with_cheap_ones_widens_the_noisy_weight():
    """Tensors in 16 bits throughout: the weight alone decides."""
    wide = OpConfig(Precision.INT16, W8, A16)
    choices = dict.fromkeys(("op0", "op1"), (NARROW, wide, FP32))
    _, figures = chain([1e-9] * 3, [1e-9] * 2)
    noises = {"op0": {"4": 1e-2, "8": 1e-5}, "op1": {"4": 1e-4, "8": 1e-7}}
    figures = WidthFigures(figures.tensors, noises)
    prices = {Widths.W4A16: 1.0, Widths.W8A16: 2.0, None: 8.0}
    path = trace_widening_path(choices, figures, lambda _, c: prices[Widths.from_config(c)])
    assert [words(plan) for plan in path[:3]] == [
        ["w4a16", "w4a16"],
        ["w8a16", "w4a16"],
        ["w8a16", "w8a16"],
    ]


def test_wider_activations_come_with_no_narrower_weight():
    w8a8, *wider, in_float = chain([1e-2] * 3, [1e-9] * 2)[0]["op0"]
    _, figures = chain([1e-2] * 3, [1e-9] * 2)
    choices = dict.fromkeys(("op0", "op1"), (w8a8, NARROW, *wider, in_float))

    def price(op, config):
        return 1.5 if config == NARROW else cost(op, config)

    path = trace_widening_path(choices, figures, price)
    assert {"w4a16"}.isdisjoint(word for plan in path for word in words(plan))
    assert words(path[1])[0] == "w8a16"


@emulated
def test_the_npu_computes_them_in_integers_as_simulated(planned, tmp_path):
    model, data, _ = planned
    held = model.converted(narrow_plan(model))
    file, x = saved(model, held, tmp_path), data[0][:1]
    (name,) = (output.name for output in file.graph.output)
    audit = audit_by_qnn(file, QNN, [{"x": x}], [{name: model.adaptor.predict(held, x)}])
    assert not audit.refused
    kernels = {row.kind: row.types for row in audit.kernels}
    assert kernels["Conv2d"] == "uint16,int8,int32→uint16"  # the description has no 4 bits
    assert kernels["FullyConnected"].startswith("uint16,int8")
    assert audit.sqnr_db > 40
