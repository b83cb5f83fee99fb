"""Weights in groups in OpenVINO: numbers, kernels, settings, refusals, storage and noise."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx_nets import MACHINE, run
from onnx_words import IDS, WEIGHTS, plan_of, words
from ov_nets import read

import neural_mp
from neural_mp import AccuracyCriterion, MixedPrecision, convert_with_plan
from neural_mp.adaptors.common.sensitivity import measure_layer_noise
from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    Quantizer,
    round_grouped_inputs,
)
from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.graph import integer_weights
from neural_mp.adaptors.openvino.ops import Role
from neural_mp.adaptors.openvino.runtime import Runner
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.errors import PlanError

#: The name of the Gemm's product without its bias.
DOWN = "down/WithoutBiases"
PLAN = {
    "embed": ("int4", "uint4 asymmetric per_group 32"),
    "up": ("int4", "uint4 asymmetric per_group 32 int8_inputs"),
    DOWN: ("int8", "uint8 asymmetric per_group 64 int8_inputs"),
}


def _without_factor() -> onnx.ModelProto:
    """The net with a plain Gemm: a factor becomes a multiplication behind the product."""
    model = words()
    (gemm,) = (node for node in model.graph.node if node.op_type == "Gemm")
    next(a for a in gemm.attribute if a.name == "alpha").f = 1.0
    return model


@pytest.fixture(scope="module")
def net():
    return read(_without_factor())


@pytest.fixture(scope="module")
def converted(net, low_bit_kernels):
    return convert_with_plan(net, plan_of(PLAN), inputs={"ids": IDS})


def _nearest(weight: np.ndarray, spec: QuantSpec) -> GroupedWeight:
    return Quantizer(spec, GroupParameters.ZERO_POINTS).round_to_nearest(weight)


def _stored(weight: np.ndarray, op: str) -> np.ndarray:
    return _nearest(weight, QuantSpec.parse(PLAN[op][1])).to_floats()


def test_results_are_those_of_the_stored_weights_and_rounded_inputs(converted):
    rows = _stored(WEIGHTS["table"], "embed")[IDS.reshape(-1)]
    up = round_grouped_inputs(rows, 32) @ _stored(WEIGHTS["w_up"].T, "up").T + WEIGHTS["b_up"]
    # The group of the inputs is one for the whole model: the smallest of the plan.
    down = round_grouped_inputs(np.maximum(up, 0), 32) @ _stored(WEIGHTS["w_down"], DOWN).T
    expected = (down + 2 * WEIGHTS["b_down"]) @ WEIGHTS["w_head"]
    actual = converted(IDS)
    # A value in the middle between two steps may be rounded to either.
    assert np.linalg.norm(actual - expected) < 2e-3 * np.linalg.norm(expected)
    reference = run(_without_factor(), ids=IDS)[0]
    assert 0.01 < np.linalg.norm(actual - reference) / np.linalg.norm(reference) < 0.15


@pytest.mark.usefixtures("low_bit_kernels")
def test_symmetric_weights_have_steps_around_zero(net):
    spec = "int4 symmetric per_group 32 int8_inputs"
    converted = convert_with_plan(net, plan_of({"up": ("int4", spec)}), inputs={"ids": IDS})
    grouped = WEIGHTS["w_up"].T.reshape(64, -1, 32)
    step = np.abs(grouped).max(-1, keepdims=True) / 7
    stored = (np.rint(grouped / step) * step).reshape(64, -1)
    rows = round_grouped_inputs(WEIGHTS["table"][IDS.reshape(-1)], 32)
    up = np.maximum(rows @ stored.T + WEIGHTS["b_up"], 0)
    expected = (up @ WEIGHTS["w_down"].T + 2 * WEIGHTS["b_down"]) @ WEIGHTS["w_head"]
    assert np.linalg.norm(converted(IDS) - expected) < 2e-3 * np.linalg.norm(expected)
    assert converted.audit().holds
    assert {kernel.precision for kernel in Runner(converted.model).executed_kernels()} >= {"i4"}


def test_kernels_read_the_weights_as_stored(converted):
    audit = converted.audit()
    assert audit.holds
    read_as_stored = {op.name for op in audit.ops if op.ran is not None and op.ran.reads_int8}
    # Biases and activations run within the kernels of their products.
    assert read_as_stored == {*PLAN, "bias", "act", "down"}
    types = {kernel.type: kernel.precision for kernel in Runner(converted.model).executed_kernels()}
    assert types["Gather"] == "u4"


def test_the_model_names_the_group_of_its_inputs_in_its_file(converted, tmp_path):
    assert converted.model.get_rt_info(list(integer_weights.INPUT_GROUP)).astype(str) == "32"
    converted.save(tmp_path)
    text = (tmp_path / "model.xml").read_text(encoding="utf-8")
    assert 'DYNAMIC_QUANTIZATION_GROUP_SIZE value="32"' in text
    again = neural_mp.load(tmp_path)
    assert np.array_equal(again(IDS), converted(IDS))
    assert again.plan == converted.plan
    assert again.audit().holds
    whole = sum(value.nbytes for value in WEIGHTS.values())
    assert again.adaptor.weight_bytes(again.held) < whole / 2  # the head stays in float


@pytest.mark.usefixtures("low_bit_kernels")
def test_reasons_name_inputs_that_no_group_divides(net):
    adaptor = OpenVinoAdaptor()
    capabilities = adaptor.space(adaptor.load(net, example={"ids": IDS}), MACHINE).capabilities
    reason = "weights in groups require inputs that a group size divides (128, 64, 32), got 40"
    assert capabilities["logits"].refusal_reason(Precision.INT4) == reason
    with pytest.raises(PlanError, match="got 40"):
        convert_with_plan(net, plan_of({"logits": PLAN["up"]}), inputs={"ids": IDS})
    with pytest.raises(PlanError, match="does not support INT4"):
        convert_with_plan(
            net, plan_of({"up": ("int4", "uint4 asymmetric per_group 32")}), inputs={"ids": IDS}
        )


def test_a_plugin_without_the_kernel_offers_none(net, monkeypatch):
    monkeypatch.setattr(integer_weights, "probe_results", lambda module, version: frozenset())
    adaptor = OpenVinoAdaptor()
    capability = adaptor.space(adaptor.load(net, example={"ids": IDS}), MACHINE).capabilities["up"]
    assert "multiplies 4-bit weights as stored" in str(capability.refusal_reason(Precision.INT4))
    assert capability.config(Precision.INT8) is not None


def test_a_layer_with_one_output_stays_out():
    reason = integer_weights.low_bit_specs(Role.PRODUCT, 1, 96)
    assert reason == "weights in groups require at least 2 outputs, got 1"


def test_tables_have_four_bits_in_groups_and_eight_by_row(net):
    adaptor = OpenVinoAdaptor()
    table = adaptor.space(adaptor.load(net, example={"ids": IDS}), MACHINE).capabilities["embed"]
    assert table.config(Precision.INT4) is not None
    assert str(table.config(Precision.INT8).weight) == "int8 symmetric per_channel minmax"


@pytest.mark.usefixtures("low_bit_kernels")
def test_four_bits_are_read_as_stored_beside_calibrated_int8(net):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(net, example={"ids": IDS})
    space = adaptor.space(model, MACHINE)
    observations = adaptor.observe(model, [{"ids": IDS}], space)
    static = space.choice(DOWN, Precision.INT8)
    plan = PrecisionPlan({**plan_of(PLAN), DOWN: static})
    mixed = convert_with_plan(net, plan, observations=observations, inputs={"ids": IDS})
    assert mixed.audit().holds
    assert {kernel.precision for kernel in Runner(mixed.model).executed_kernels()} >= {"u4", "u8"}


def test_a_product_that_a_constant_multiplies_names_the_reason():
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(read(words()), example={"ids": IDS})
    refusal = str(adaptor.space(model, MACHINE).capabilities[DOWN].refusal_reason(Precision.INT4))
    assert "a multiplication by a constant follows" in refusal


@pytest.mark.usefixtures("low_bit_kernels")
def test_scores_equal_those_of_the_same_weights_in_onnx_runtime(net):
    ours, onnx_runtime = OpenVinoAdaptor(), OnnxRuntimeAdaptor()
    batch = {"ids": IDS}
    scores = []
    for adaptor, source in ((ours, net), (onnx_runtime, _without_factor())):
        model = adaptor.load(source, example=batch)
        space = adaptor.space(model, MACHINE).without_data()
        scores.append(measure_layer_noise(adaptor, model, [batch], space))
    assert list(scores[0]) == ["embed", "up", DOWN, "logits"]
    for our_op, their_op in (("embed", "embed"), ("up", "up"), (DOWN, "down")):
        common = scores[0][our_op].keys() & scores[1][their_op].keys()
        assert len(common) >= 1
        for text in common:
            assert scores[0][our_op][text] == pytest.approx(scores[1][their_op][text], rel=1e-3)


@pytest.mark.slow
@pytest.mark.usefixtures("low_bit_kernels")
def test_a_search_by_size_meets_its_target(net, tmp_path):
    classes = run(_without_factor(), ids=IDS)[0].argmax(-1).reshape(IDS.shape)
    data = [({"ids": IDS[i : i + 1]}, classes[i]) for i in range(4)]
    converter = MixedPrecision(precisions="int4,int8", workspace=tmp_path, cache=False)
    converter.model, converter.objective, converter.metric = net, "footprint", "topk"
    converter.eval_dataloader = data
    converter.accuracy_criterion = AccuracyCriterion(0.45)
    result = converter()
    assert result.met
    assert result.plan.counts()[Precision.INT4] >= 2
    assert result.report.size < 0.6 * result.report.baseline_size
