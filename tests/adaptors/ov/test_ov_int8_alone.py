"""INT8 weights by channel beside float inputs, in OpenVINO: numbers, kernels, storage, refusals."""

from __future__ import annotations

import numpy as np
import pytest
from machine import products_here
from onnx_nets import MACHINE
from onnx_words import IDS, WEIGHTS, plan_of, words
from ov_nets import read, require_by_channel, run

import neural_mp
from neural_mp import convert_with_plan
from neural_mp.adaptors.common.sensitivity import measure_layer_noise
from neural_mp.adaptors.common.weights.grouped_weight import round_grouped_inputs
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.openvino.adaptor import OpenVinoAdaptor
from neural_mp.adaptors.openvino.graph import integer_weights
from neural_mp.adaptors.openvino.runtime import Runner, make_core, ops, ov
from neural_mp.core.enums import Approach
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audit_model
from neural_mp.space import list_effective_ops

F32 = np.float32
INT8 = Precision.INT8
DOWN = "down/WithoutBiases"
BY_CHANNEL = "int8 symmetric per_channel minmax int8_inputs"
BY_ROW = "int8 symmetric per_channel minmax"
#: 96, 64 and 40 inputs: one group size for all of them, 32, and a last group of 8.
PLAN = {
    "embed": ("int8", BY_ROW),
    "up": ("int8", BY_CHANNEL),
    DOWN: ("int8", BY_CHANNEL),
    "logits": ("int8", BY_CHANNEL),
}


def stored(weight: np.ndarray) -> np.ndarray:
    """Return the floats of a weight [outputs, inputs] with 127 steps of its largest by row."""
    step = np.abs(weight).max(1, keepdims=True) / 127
    return np.rint(weight / step) * step


@pytest.fixture(scope="module")
def by_channel_kernels():
    require_by_channel()


@pytest.fixture(scope="module")
def net():
    model = words()
    (gemm,) = (node for node in model.graph.node if node.op_type == "Gemm")
    next(a for a in gemm.attribute if a.name == "alpha").f = 1.0
    return read(model)


@pytest.fixture(scope="module")
def converted(net, by_channel_kernels):
    return convert_with_plan(net, plan_of(PLAN), inputs={"ids": IDS})


def test_results_are_those_of_the_stored_weights_and_rounded_inputs(converted):
    rows = stored(WEIGHTS["table"])[IDS.reshape(-1)]
    up = round_grouped_inputs(rows, 32) @ stored(WEIGHTS["w_up"].T).T + WEIGHTS["b_up"]
    down = round_grouped_inputs(np.maximum(up, 0), 32) @ stored(WEIGHTS["w_down"]).T
    down += 2 * WEIGHTS["b_down"]
    expected = round_grouped_inputs(down, 32) @ stored(WEIGHTS["w_head"].T).T
    # A value in the middle between two steps may be rounded to either.
    assert np.linalg.norm(converted(IDS) - expected) < 3e-3 * np.linalg.norm(expected)


def test_kernels_read_the_weights_as_stored(converted):
    audit = converted.audit()
    assert audit.holds
    assert {op.name for op in audit.ops if op.planned.approach is Approach.WEIGHT_ONLY} == {*PLAN}
    kernels = Runner(converted.model).executed_kernels()
    assert [k.precision for k in kernels if k.type == "FullyConnected"] == ["i8", "i8", "i8"]
    assert "u8" in {k.precision for k in kernels if k.type == "Gather"}


def test_a_saved_model_keeps_the_bytes_for_plain_openvino(converted, tmp_path):
    converted.save(tmp_path)
    again = neural_mp.load(tmp_path)
    assert np.array_equal(again(IDS), converted(IDS))
    assert again.plan == converted.plan
    assert again.audit().holds
    weights = sum(value.nbytes for value in WEIGHTS.values())
    assert again.adaptor.weight_bytes(again.held) < 0.32 * weights
    settings = {"INFERENCE_PRECISION_HINT": "f32"}
    plain = make_core().compile_model(tmp_path / "model.xml", "CPU", settings)
    assert np.array_equal(plain(IDS)[0], converted(IDS))


def test_tables_stay_in_bytes_beside_calibrated_int8(net):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(net, example={"ids": IDS})
    space = adaptor.space(model, MACHINE)
    observations = adaptor.observe(model, [{"ids": IDS}], space)
    static = {op: space.choice(op, INT8) for op in ("up", DOWN)}
    assert {config.approach for config in static.values()} == {Approach.STATIC}
    plan = PrecisionPlan({**plan_of({"embed": PLAN["embed"]}), **static})
    mixed = convert_with_plan(net, plan, observations=observations, inputs={"ids": IDS})
    assert mixed.audit().holds
    constants = {
        k.name: k.precision for k in Runner(mixed.model).executed_kernels() if k.type == "Const"
    }
    assert constants["embed/weight_alone/int8"] == "u8"
    reference = run(net, IDS)[0]
    assert np.linalg.norm(mixed(IDS) - reference) < 0.05 * np.linalg.norm(reference)


def test_a_table_that_is_an_output_keeps_its_name():
    table = np.random.default_rng(0).normal(size=(20, 16)).astype(F32)
    ids = ops.parameter([-1], np.int64, name="ids")
    rows = ops.gather(ops.constant(table), ids, ops.constant(np.int64(0)))
    rows.set_friendly_name("embed")
    rows.output(0).set_names({"rows"})
    source = ov.Model([rows], [ids], "table")
    read_ids = np.array([3, -1, 19])
    quantized = convert_with_plan(source, plan_of({"embed": ("int8", BY_ROW)}), inputs=read_ids)
    assert quantized.model.outputs[0].any_name == "rows"
    np.testing.assert_allclose(quantized(read_ids), stored(table)[read_ids], rtol=1e-5)


@pytest.mark.usefixtures("by_channel_kernels")
def test_the_noise_of_a_weight_includes_its_rounded_inputs(net):
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(net, example={"ids": IDS})
    space = adaptor.space(model, MACHINE).without_data()
    noise = measure_layer_noise(adaptor, model, [{"ids": IDS}], space)["up"]
    rows = WEIGHTS["table"][IDS.reshape(-1)]
    truth = rows @ WEIGHTS["w_up"]
    error = round_grouped_inputs(rows, 32) @ stored(WEIGHTS["w_up"].T).T - truth
    assert noise[BY_CHANNEL] == pytest.approx((error**2).sum() / (truth**2).sum(), rel=1e-3)


def test_few_inputs_and_single_outputs_stay_out():
    assert integer_weights.by_channel_spec(8, 31) is None
    assert integer_weights.by_channel_spec(1, 96) is None


def test_a_plugin_without_the_kernel_offers_none(net, monkeypatch):
    monkeypatch.setattr(integer_weights, "probe_results", lambda module, version: frozenset())
    adaptor = OpenVinoAdaptor()
    capabilities = adaptor.space(adaptor.load(net, example={"ids": IDS}), MACHINE).capabilities
    assert Approach.WEIGHT_ONLY not in capabilities["up"].int8_approaches
    assert Approach.WEIGHT_ONLY in capabilities["embed"].int8_approaches


def test_other_layers_name_the_reason():
    x = ops.parameter([1, 4, 8, 8], F32, name="x")
    kernel = np.ones((8, 4, 3, 3), F32)
    outputs = ops.convolution(x, kernel, [1, 1], [0, 0], [0, 0], [1, 1])
    adaptor = OpenVinoAdaptor()
    model = adaptor.load(ov.Model([outputs], [x], "net"))
    (capability,) = adaptor.space(model, MACHINE).capabilities.values()
    assert "restores such weights to floats" in str(capability.refusal_reason(Precision.INT4))
    assert Approach.WEIGHT_ONLY not in capability.int8_approaches


@pytest.mark.usefixtures("by_channel_kernels")
def test_weights_alone_keep_their_range_on_every_cpu():
    """Also where their input is quantized for another layer: their kernel does not saturate."""
    x = ops.parameter([-1, 64], F32, name="x")
    weights = np.random.default_rng(0).normal(size=(3, 64, 64)).astype(F32)
    first = ops.matmul(x, weights[0], False, True)
    activation = ops.relu(first)
    outputs = [ops.matmul(activation, weight, False, True) for weight in weights[1:]]
    for node, name in zip((first, *outputs), ("first", "second", "third"), strict=True):
        node.set_friendly_name(name)
    adaptor = OpenVinoAdaptor()
    batch = np.random.default_rng(1).normal(size=(6, 64)).astype(F32)
    model = adaptor.load(ov.Model(outputs, [x], "net"), example=batch)
    space = adaptor.space(model, MACHINE)
    observations = adaptor.observe(model, [batch], space)
    expected = adaptor.predict(model, batch)
    weight_only = plan_of({name: ("int8", BY_CHANNEL) for name in ("first", "second", "third")})
    static = {name: space.choice(name, INT8) for name in ("first", "second")}
    exact = products_here("openvino", KernelKind.DENSE) is Int8Accumulation.EXACT
    wide = {KernelKind.DENSE} if exact else set()
    for plan, kinds in ((weight_only, set()), (PrecisionPlan({**weight_only, **static}), wide)):
        resolved = space.resolve(plan)
        quantized = adaptor.convert(model, resolved, observations, space)
        assert adaptor.portability.full_range_kernels(quantized) == kinds
        portable = adaptor.portability.with_reduced_range(quantized)
        assert not adaptor.portability.full_range_kernels(portable)
        for theirs, ours in zip(expected, adaptor.predict(portable, batch), strict=True):
            assert np.linalg.norm(ours - theirs) < 0.03 * np.linalg.norm(theirs)
        names = {node.get_friendly_name() for node in adaptor.native(portable).get_ops()}
        assert "third/weight_alone/int8" in names
        assert audit_model(
            LoadedModel(adaptor, portable), list_effective_ops(space, resolved)
        ).holds
