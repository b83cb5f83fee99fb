"""Weights in groups in ONNX Runtime: numbers, kernels, refusals and storage."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_nets import MACHINE, run
from onnx_words import HIDDEN, IDS, WEIGHTS, WIDTH, draw, plan_of, words

import neural_mp
from neural_mp import convert_with_plan
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.onnxrt.kernels import n_bits
from neural_mp.core.precision import Precision
from neural_mp.errors import PlanError

#: Op → precision and quantization of its weight.
PLAN = {
    "embed": ("int4", "uint4 asymmetric per_group 32"),
    "up": ("int4", "uint4 asymmetric per_group 64 int8_inputs"),
    "down": ("int8", "uint8 asymmetric per_group 64 int8_inputs"),
    "head": ("int4", "uint4 asymmetric per_group 32"),
}


@pytest.fixture(scope="module")
def converted():
    try:
        return convert_with_plan(words(), plan_of(PLAN), inputs={"ids": IDS})
    except PlanError as error:
        if "this build of ONNX Runtime has no" not in str(error):
            raise
        pytest.skip(str(error))


def stored(model: onnx.ModelProto, op: str) -> np.ndarray:
    """The weight [outputs, inputs] that a node stores, by the operators' documentation."""
    target = next(node for node in model.graph.node if node.name == op)
    attributes = {a.name: a.i for a in target.attribute}
    tensors = {t.name: numpy_helper.to_array(t) for t in model.graph.initializer}
    codes, scales, zeros = [tensors[n] for n in target.input if n in tensors][:3]
    if attributes["bits"] == 4:
        codes, zeros = (np.stack([a & 15, a >> 4], -1).reshape(len(a), -1) for a in (
            codes.reshape(len(scales), -1), zeros))  # fmt: skip
    size = attributes["block_size"]
    codes = codes.reshape(len(scales), -1)
    scales, zeros = (np.repeat(a, size, 1)[:, : codes.shape[1]] for a in (scales, zeros))
    width = attributes.get("K", WIDTH)
    return ((codes.astype(np.float32) - zeros[:, : codes.shape[1]]) * scales)[:, :width]


def in_steps(rows: np.ndarray, size: int) -> np.ndarray:
    """Rows rounded to 127 steps of the largest magnitude in each group."""
    rounded = np.empty_like(rows)
    for start in range(0, rows.shape[1], size):
        part = rows[:, start : start + size]
        step = np.abs(part).max(1, keepdims=True) / 127
        rounded[:, start : start + size] = np.rint(part / step) * step
    return rounded


def test_results_are_those_of_the_stored_weights_and_rounded_inputs(converted):
    model = converted.model
    rows = stored(model, "embed")[IDS.reshape(-1)]
    up = in_steps(rows, 64) @ stored(model, "up").T + WEIGHTS["b_up"]
    # Factors of the Gemm are part of its weight and of its bias.
    down = in_steps(np.maximum(up, 0), 64) @ stored(model, "down").T + 2 * WEIGHTS["b_down"]
    expected = down @ stored(model, "head").T
    outputs = converted(IDS)
    # A value in the middle between two steps may be rounded to either.
    assert np.linalg.norm(outputs - expected) < 2e-3 * np.linalg.norm(expected)
    reference = run(words(), ids=IDS)[0]
    assert 0.01 < np.linalg.norm(outputs - reference) / np.linalg.norm(reference) < 0.15


def test_symmetric_weights_have_steps_around_zero_and_no_zero_points():
    spec = "int4 symmetric per_group 32 int8_inputs"
    plan = plan_of({"up": ("int4", spec), "down": ("int4", spec)})
    converted = convert_with_plan(words(), plan, inputs={"ids": IDS})
    inputs = {node.name: len(node.input) for node in converted.model.graph.node}
    assert (inputs["up"], inputs["down"]) == (3, 6)  # the bias of the Gemm is the sixth

    def rounded(weight):
        grouped = weight.reshape(len(weight), -1, 32)
        step = np.abs(grouped).max(-1, keepdims=True) / 7
        return (np.rint(grouped / step) * step).reshape(weight.shape)

    rows = in_steps(WEIGHTS["table"][IDS.reshape(-1)], 32)
    up = np.maximum(rows @ rounded(WEIGHTS["w_up"].T).T + WEIGHTS["b_up"], 0)
    down = in_steps(up, 32) @ rounded(WEIGHTS["w_down"]).T * 0.5 + 2 * WEIGHTS["b_down"]
    expected = down @ WEIGHTS["w_head"]
    assert np.linalg.norm(converted(IDS) - expected) < 2e-3 * np.linalg.norm(expected)
    assert converted.audit().holds


@pytest.mark.parametrize("size", [32, 64])
def test_two_bits_are_multiplied_as_stored(size):
    spec = f"uint2 asymmetric per_group {size} int8_inputs"
    converted = convert_with_plan(words(), plan_of({"up": ("int2", spec)}), inputs={"ids": IDS})
    weight = np.pad(WEIGHTS["w_up"].T, ((0, 0), (0, -WIDTH % size)))
    grouped = weight.reshape(HIDDEN, -1, size)
    low, high = grouped.min(-1, keepdims=True), grouped.max(-1, keepdims=True)
    step = (high - low) / 3
    zero = np.rint(-low / step)
    rounded = (np.clip(np.rint(grouped / step) + zero, 0, 3) - zero) * step
    rounded = rounded.reshape(HIDDEN, -1)[:, :WIDTH]
    rows = in_steps(WEIGHTS["table"][IDS.reshape(-1)], size)
    up = np.maximum(rows @ rounded.T + WEIGHTS["b_up"], 0)
    down = up @ WEIGHTS["w_down"].T * 0.5 + 2 * WEIGHTS["b_down"]
    expected = down @ WEIGHTS["w_head"]
    assert np.linalg.norm(converted(IDS) - expected) < 5e-3 * np.linalg.norm(expected)
    assert converted.audit().holds
    node = next(node for node in converted.model.graph.node if node.name == "up")
    assert {a.name: a.i for a in node.attribute}["bits"] == 2


def test_the_kernels_are_those_of_the_plan(converted):
    audit = converted.audit()
    assert audit.holds
    ran = {op.name: (op.kernels, op.ran_in) for op in audit.ops if op.name in PLAN}
    assert ran["embed"] == (("GatherBlockQuantized",), Precision.INT8)
    assert ran["up"] == ran["down"] == (("MatMulNBits",), Precision.INT8)
    assert ran["head"] == (("MatMulNBits",), Precision.FP32)
    levels = {
        node.name: next(a.i for a in node.attribute if a.name == "accuracy_level")
        for node in converted.model.graph.node
        if node.op_type == "MatMulNBits"
    }
    assert levels == {"up": 4, "down": 4, "head": 0}


def test_the_weights_shrink_and_are_read_back_as_saved(converted, tmp_path):
    converted.save(tmp_path)
    again = neural_mp.load(tmp_path)
    assert np.array_equal(again(IDS), converted(IDS))
    assert again.plan == converted.plan
    assert again.audit().holds
    whole = sum(value.nbytes for value in WEIGHTS.values())
    assert again.adaptor.weight_bytes(again.held) < whole / 4


def test_candidates_are_the_groups_that_the_inputs_fill_beside_int8():
    adaptor = OnnxRuntimeAdaptor()
    model = adaptor.load(words(), example={"ids": IDS})
    space = adaptor.space(model, MACHINE)
    texts = [str(c.weight) for c in space.capabilities["up"].configs if c.approach == "weight_only"]
    assert texts == [
        f"{form} per_group {size} minmax {words}int8_inputs"
        for words in ("awq gptq ", "gptq ", "awq ", "")
        for form in (
            "int4 symmetric",
            "uint4 asymmetric",
            "uint8 asymmetric",
            "uint2 asymmetric",
        )
        for size in (64, 32)
        if not words or "8" not in form
    ]
    assert {"static", "dynamic", "weight_only"} == set(space.capabilities["up"].int8_approaches)
    (rows,) = {c.weight.dtype for c in space.capabilities["embed"].configs if c.weight} - {"int8"}
    assert rows == "uint4"


def test_an_op_without_four_bits_names_the_reason():
    model = words(w_up=draw(WIDTH, 24), b_up=draw(24), w_down=draw(40, 24))
    model.graph.initializer[-1].CopyFrom(numpy_helper.from_array(np.array([-1, 24]), "rows"))
    adaptor = OnnxRuntimeAdaptor()
    capabilities = adaptor.space(adaptor.load(model, example={"ids": IDS}), MACHINE).capabilities
    reason = "weights in groups require at least 32 inputs, got 24"
    assert capabilities["down"].refusal_reason(Precision.INT4) == reason
    assert capabilities["act"].refusal_reason(Precision.INT4) == "no integer kernel"
    assert capabilities["up"].refusal_reason(Precision.INT4) is None


def test_a_runtime_without_the_kernel_offers_none(monkeypatch):
    monkeypatch.setattr(n_bits, "probe_results", lambda module, version: frozenset())
    adaptor = OnnxRuntimeAdaptor()
    capabilities = adaptor.space(adaptor.load(words(), example={"ids": IDS}), MACHINE).capabilities
    assert "has no MatMulNBits of 4 bits" in str(capabilities["up"].refusal_reason(Precision.INT4))
    assert capabilities["up"].config(Precision.INT8) is not None


@pytest.mark.parametrize(
    "spec", ["uint8 asymmetric per_group 64", "uint4 asymmetric per_group 128 int8_inputs"]
)
def test_a_plan_cannot_request_slow_kernels_or_groups_larger_than_the_inputs(spec):
    precision = "int8" if spec.startswith("uint8") else "int4"
    with pytest.raises(PlanError, match="does not support INT"):
        convert_with_plan(words(), plan_of({"up": (precision, spec)}), inputs={"ids": IDS})


def test_a_product_within_a_branch_is_converted():
    value_info = helper.make_tensor_value_info
    body = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["z"], name="within")], "then", [],
        [value_info("z", TensorProto.FLOAT, None)],
    )  # fmt: skip
    else_body = helper.make_graph(
        [helper.make_node("Identity", ["x"], ["o"], name="other")], "else", [],
        [value_info("o", TensorProto.FLOAT, None)],
    )  # fmt: skip
    choice = helper.make_node(
        "If", ["c"], ["y"], then_branch=body, else_branch=else_body, name="if"
    )
    graph = helper.make_graph(
        [choice], "g",
        [value_info("c", TensorProto.BOOL, []), value_info("x", TensorProto.FLOAT, ["n", HIDDEN])],
        [value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(draw(HIDDEN, HIDDEN), "w")],
    )  # fmt: skip
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    feeds = {
        "c": np.array(True),
        "x": np.random.default_rng(0).standard_normal((3, HIDDEN)).astype(np.float32),
    }
    converted = convert_with_plan(model, plan_of({"if/within": PLAN["up"]}), inputs=feeds)
    assert converted.audit().holds
    (reference,) = run(model, **feeds)
    noise = np.linalg.norm(converted(feeds) - reference) / np.linalg.norm(reference)
    assert 0.01 < noise < 0.15


def test_other_providers_have_no_such_kernels():
    adaptor = OnnxRuntimeAdaptor()
    model = replace(adaptor.load(words(), example={"ids": IDS}), provider="OtherProvider")
    refusal = adaptor.space(model, MACHINE).capabilities["up"].refusal_reason(Precision.INT4)
    assert refusal is not None
    assert "OtherProvider has no" in refusal
