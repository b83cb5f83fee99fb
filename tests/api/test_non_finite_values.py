"""NaN and Inf in models and in calibration data: what holds them stays float, the rest is INT8."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from neural_mp import MixedPrecision
from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.api.explain import explain_op
from neural_mp.api.loading import load_source
from neural_mp.api.replay import convert_with_plan
from neural_mp.core.hardware import detect
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, DataError
from neural_mp.util.noise import compute_mean_nsr, nsr_to_decibels

CHANNELS = 8
RANDOM = np.random.default_rng(0)
IMAGES = RANDOM.normal(size=(12, 3, 8, 8)).astype(np.float32)
BATCHES = np.split(IMAGES, 3)
NEAR_SQNR_DB = 25.0
#: Graph between two convolutions, from `c` to `k` → the tensors that hold NaN or Inf.
MIDDLES = {
    "pad": ("Pad(c, border, infinite) MaxPool(p)", "Inf"),
    "crop": ("Pad(c, border, undefined) Slice(p)", "NaN"),
    "mask": ("Where(positive, c, infinite) MaxPool(p)", "Inf"),
}


def weight(*shape: int) -> np.ndarray:
    """Random weights whose products keep the magnitude of their inputs."""
    return (RANDOM.normal(size=shape) / np.sqrt(np.prod(shape[1:]))).astype(np.float32)


CONSTANTS = {
    "w": weight(CHANNELS, 3, 3, 3),
    "u": weight(CHANNELS, CHANNELS, 3, 3),
    "border": np.array([0, 0, 0, 0, 0, 0, 1, 1]),
    "infinite": np.float32(-np.inf),
    "undefined": np.float32(np.nan),
    "zero": np.float32(0),
    "begin": np.array([0, 0]),
    "end": np.array([8, 8]),
    "axes": np.array([2, 3]),
    "positive": np.arange(8) % 3 > 0,
}


def network(*middle: onnx.NodeProto, before: tuple[onnx.NodeProto, ...] = ()) -> onnx.ModelProto:
    """Convolution of `x`, or of `r` if nodes `before` make it; Relu `c`; `middle`; convolution."""
    first = "r" if before else "x"
    nodes = [
        *before,
        helper.make_node("Conv", [first, "w"], ["d"], "first", pads=[1] * 4),
        helper.make_node("Relu", ["d"], ["c"], "relu"),
        *middle,
        helper.make_node("Conv", ["k" if middle else "c", "u"], ["y"], "last"),
    ]
    consumed = {name for node in nodes for name in node.input}
    constants = [
        numpy_helper.from_array(np.asarray(CONSTANTS[n]), n) for n in CONSTANTS.keys() & consumed
    ]
    graph = helper.make_graph(
        nodes,
        "net",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        constants,
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def onnx_middle(kind: str) -> onnx.ModelProto:
    """The network with one of `MIDDLES`."""
    pool = helper.make_node("MaxPool", ["p"], ["k"], "pool", kernel_shape=[3, 3], strides=[2, 2])
    crop = helper.make_node("Slice", ["p", "begin", "end", "axes"], ["k"], "crop")
    first, last = {
        "pad": (helper.make_node("Pad", ["c", "border", "infinite"], ["p"], "pad"), pool),
        "crop": (helper.make_node("Pad", ["c", "border", "undefined"], ["p"], "pad"), crop),
        "mask": (helper.make_node("Where", ["positive", "c", "infinite"], ["p"], "mask"), pool),
    }[kind]
    return network(first, last)


def torch_middle(kind: str) -> object:
    """The same network in PyTorch."""
    import torch
    from torch import nn
    from torch.nn import functional

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3)

        def forward(self, x):
            c = self.first(x).relu()
            if kind == "mask":
                p = c.masked_fill(torch.arange(8) % 3 == 0, -torch.inf)
                return self.last(functional.max_pool2d(p, 3, 2, 1))
            value = -torch.inf if kind == "pad" else torch.nan
            p = functional.pad(c, (0, 1, 0, 1), value=value)
            k = functional.max_pool2d(p, 3, 2) if kind == "pad" else p[..., :8, :8]
            return self.last(k)

    torch.manual_seed(0)
    return Net().eval()


def keras_middle(kind: str) -> object:
    """The same network in TensorFlow, with channels last."""
    import tensorflow as tf

    w, u = (tf.constant(CONSTANTS[name].transpose(2, 3, 1, 0)) for name in "wu")

    @tf.function(input_signature=[tf.TensorSpec([None, 3, 8, 8], tf.float32, "x")])
    def net(x):
        c = tf.nn.relu(tf.nn.conv2d(tf.transpose(x, [0, 2, 3, 1]), w, 1, "SAME"))
        if kind == "mask":
            p = tf.where(tf.constant(CONSTANTS["positive"])[:, None], c, -np.inf)
            return {"y": tf.nn.conv2d(tf.nn.max_pool2d(p, 3, 2, "SAME"), u, 1, "VALID")}
        value = -np.inf if kind == "pad" else np.nan
        p = tf.pad(c, [[0, 0], [0, 1], [0, 1], [0, 0]], constant_values=value)
        k = tf.nn.max_pool2d(p, 3, 2, "VALID") if kind == "pad" else p[:, :8, :8]
        return {"y": tf.nn.conv2d(k, u, 1, "VALID")}

    return net.get_concrete_function()


MAKERS = {"onnx": onnx_middle, "torch": torch_middle, "tensorflow": keras_middle}


@pytest.mark.parametrize("kind", MIDDLES)
@pytest.mark.parametrize(
    "framework",
    [
        "onnx",
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("tensorflow", marks=pytest.mark.slow),
    ],
)
def test_tensors_with_nan_or_inf_stay_float_and_layers_around_them_run_in_int8(framework, kind):
    source = MAKERS[framework](kind)
    adaptor = adaptor_for(source)
    loaded = adaptor.load(source, example=BATCHES[0])
    space = adaptor.space(loaded, detect({})).restricted_to([Precision.INT8])
    model = LoadedModel(adaptor, loaded)
    tunable = model.in_space(space).with_calibration(BATCHES)
    plan = tunable.space.resolve(tunable.space.fastest_plan())
    layers = [op.name for op in space.graph if op.weights >= CONSTANTS["w"].size]
    assert len(layers) == 2
    assert {plan.effective[name] for name in layers} == {Precision.INT8}
    held_values = tunable.observations.non_finite
    assert {observation.value for observation in held_values.values()} <= {MIDDLES[kind][1]}
    assert not plan.flow.int8_outputs & held_values.keys()
    for name in held_values:
        reasons = (c.refusal_reason(Precision.INT8) for c in tunable.space.capabilities.values())
        assert any(f"tensor {name!r} held" in (reason or "") for reason in reasons)
    expected, outputs = (
        variant.run_float_outputs(IMAGES) for variant in (model, tunable.convert_by_plan(plan))
    )
    assert np.isfinite(expected[0]).all()
    assert nsr_to_decibels(compute_mean_nsr(expected, outputs)) > NEAR_SQNR_DB


def converted(model: object, batches: list[np.ndarray], **options: object) -> object:
    """The result without accuracy check, with every eligible op in INT8."""
    options = {"exit_policy": {"performance_only": True}, "cache": False, **options}
    return MixedPrecision(model=model, precisions="int8", calib_dataloader=batches, **options)()


def with_nan(*samples: int) -> list[np.ndarray]:
    """The batches with NaN in one number of some samples."""
    images = IMAGES.copy()
    images[list(samples), 1, 2, 3] = np.nan
    return np.split(images, 3)


def test_record_explanation_and_replay_give_the_reason(tmp_path):
    model, reason = onnx_middle("pad"), "tensor 'pad' held Inf in batch 1 of the calibration data"
    result = converted(model, BATCHES)
    assert any("1 tensor ('pad') held Inf in batch 1" in text for text in result.report.warnings)
    setup = result.record.setup
    assert reason in setup.capabilities["pool"].reasons[Precision.INT8]
    assert setup.follow_plan(result.plan).effective["pool"] is Precision.FP32
    result.save(tmp_path / "saved")
    plan = tmp_path / "saved" / "plan.yaml"
    _, decisions = explain_op(load_source(model, None, None), "pool", (Precision.INT8,), plan)
    assert reason in decisions[Precision.INT8].reason
    replayed = convert_with_plan(model, plan)
    np.testing.assert_array_equal(replayed(IMAGES), result(IMAGES))


@pytest.mark.parametrize(
    ("samples", "batch", "count"), [((0,), 1, 1), ((9, 11), 3, 2), ((4, 9), 2, 2)]
)
def test_samples_whose_nan_reaches_the_outputs_are_left_out_of_calibration(samples, batch, count):
    batches = with_nan(*samples)
    result = converted(network(), batches)
    message = f"{count} sample{'s'[: count > 1]} with NaN in input '0' (first in batch {batch} "
    assert any(message in warning for warning in result.report.warnings)
    assert not any("SQNR" in warning for warning in result.report.warnings)
    assert result.plan.counts() == {Precision.INT8: 2}
    whole = np.stack(
        [np.delete(IMAGES, samples, axis=0).min(), np.delete(IMAGES, samples, 0).max()]
    )
    assert result.observations.ranges["x"]["minmax"] == pytest.approx(tuple(whole))
    assert result.report.output_sqnr_db > NEAR_SQNR_DB


@pytest.mark.slow
def test_other_runtimes_are_compared_without_damaged_samples():
    """A Relu of OpenVINO makes 0 of NaN: no sample is damaged there, and the input stays float."""
    result = converted(network(), with_nan(0, 9), runtime="openvino")
    assert result.plan.counts()[Precision.INT8]
    assert any("1 tensor ('x') held NaN in batch 1" in text for text in result.report.warnings)
    assert result.report.output_sqnr_db > NEAR_SQNR_DB


def test_a_batch_of_damaged_samples_alone_is_left_out():
    batches = with_nan(0, 1, 2, 3)
    observations = converted(network(), batches).observations
    assert observations.samples == 8
    assert observations.ranges["x"]["minmax"] == pytest.approx((IMAGES[4:].min(), IMAGES[4:].max()))


def test_nan_in_every_sample_is_an_error_of_the_data():
    with pytest.raises(DataError, match="NaN in input '0' reaches the outputs of every sample"):
        converted(network(), with_nan(*range(12)))


def test_nan_that_the_model_replaces_is_part_of_the_data():
    replaced = (
        helper.make_node("IsNaN", ["x"], ["missing"], "missing"),
        helper.make_node("Where", ["missing", "zero", "x"], ["r"], "replaced"),
    )
    result = converted(network(before=replaced), with_nan(0, 5))
    assert not result.observations.nan_samples
    assert result.observations.samples == 12
    assert result.plan.counts() == {Precision.INT8: 2}
    assert result.report.output_sqnr_db > NEAR_SQNR_DB


def test_a_model_without_any_finite_output_is_refused():
    root = helper.make_node("Sub", ["c", "c"], ["s"], "difference")
    undefined = helper.make_node("Div", ["s", "s"], ["k"], "undefined")
    with pytest.raises(ConversionError, match=r"outputs .* must be finite .*, got only NaN"):
        converted(network(root, undefined), BATCHES)


@pytest.mark.parametrize("place", [0, 1, 3])
def test_an_empty_batch_changes_nothing(place):
    batches = [*BATCHES]
    batches.insert(place, IMAGES[:0])
    result, whole = converted(network(), batches), converted(network(), BATCHES)
    assert result.observations == whole.observations
    assert result.report.output_sqnr_db == pytest.approx(whole.report.output_sqnr_db)
    assert not any("SQNR" in warning for warning in result.report.warnings)


def test_dynamic_int8_stays_clear_of_tensors_with_nan():
    """The range of a run is that of all rows: a row of NaN would spoil the others."""
    nodes = [
        helper.make_node("Add", ["x", "mask"], ["scores"], "scores"),
        helper.make_node("Softmax", ["scores"], ["p"], "softmax"),
        helper.make_node("MatMul", ["p", "a"], ["o"], "first"),
        helper.make_node("IsNaN", ["o"], ["lost"], "lost"),
        helper.make_node("Where", ["lost", "zero", "o"], ["f"], "found"),
        helper.make_node("MatMul", ["f", "b"], ["y"], "last"),
    ]
    constants = {"a": weight(16, 32), "b": weight(32, 8), "zero": np.float32(0)}
    graph = helper.make_graph(
        nodes,
        "net",
        [
            helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", size])
            for name, size in (("x", 16), ("mask", 16))
        ],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in constants.items()],
    )
    opsets = [helper.make_opsetid("", 17)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=9)
    mask = np.zeros((6, 16), np.float32)
    mask[2] = -np.inf
    rows = RANDOM.normal(size=(6, 16)).astype(np.float32)
    batches = [{"x": rows, "mask": np.zeros_like(mask)}, {"x": rows, "mask": mask}]
    result = converted(model, batches, approach="dynamic")
    assert result.plan["first"].precision is Precision.FP32
    assert result.plan["last"].precision is Precision.INT8
    assert result.observations.non_finite["softmax"].batch == 2
    assert any("tensor ('softmax') held NaN in batch 2" in text for text in result.report.warnings)
    assert result.report.output_sqnr_db > NEAR_SQNR_DB
