"""Weights in 4 bits and in FP16: kernels, files, and the values that they stand for."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from litert_nets import as_litert, run_litert

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision, make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.profiling.audit import Verdict
from neural_mp.testing import machine, signal_to_noise

ADAPTOR = LiteRtAdaptor()
DRAWN = np.random.default_rng(0).normal(size=(16, 256)).astype(np.float32)
SPECS = [
    *(f"int4 symmetric per_group {size} int8_inputs" for size in (32, 64, 128, 256)),
    "int8 symmetric per_channel int8_inputs",
]


@pytest.fixture(scope="module")
def dense():
    """One dense layer."""
    keras.utils.set_random_seed(0)
    rows = keras.Input((256,), name="rows")
    return as_litert(keras.Model(rows, layers.Dense(24, bias_initializer="normal")(rows)))


def capability(content):
    """Return the capability of the only dense layer."""
    space = ADAPTOR.space(ADAPTOR.load(content), machine())
    (op,) = [op.name for op in space.graph if op.type == "FULLY_CONNECTED"]
    return space.capabilities[op]


def convert(content, config):
    """Return a model with its only dense layer in a config, and the layer."""
    model = ADAPTOR.load(content)
    space = ADAPTOR.space(model, machine())
    (op,) = [op.name for op in space.graph if op.type == "FULLY_CONNECTED"]
    plan = space.resolve(PrecisionPlan({op: config}))
    return ADAPTOR.convert(model, plan, ADAPTOR.observe(model, [DRAWN], space), space), op


def round_rows(rows: np.ndarray) -> np.ndarray:
    """Return rows as a kernel with dynamic inputs reads them: 255 steps from min to max, with 0."""
    low = np.minimum(rows.min(1, keepdims=True), 0)
    high = np.maximum(rows.max(1, keepdims=True), 0)
    step = (high - low) / 255
    return np.rint(rows / step) * step


def round_weight(weight: np.ndarray, bits: int, group: int) -> np.ndarray:
    """Return a weight [outputs, inputs] with symmetric scales, in bfloat16 below a whole row."""
    grouped = weight.reshape(len(weight), -1, group)
    limit = (1 << bits - 1) - 1
    scales = np.abs(grouped).max(axis=2, keepdims=True) / limit
    if group < weight.shape[1]:
        kept = scales.astype(np.float32).view(np.uint32)
        kept = kept + 0x7FFF + (kept >> 16 & 1) & np.uint32(0xFFFF0000)
        scales = kept.view(np.float32)
    steps = np.clip(np.rint(grouped / scales), -limit - 1, limit)
    return (steps * scales).reshape(weight.shape)


@pytest.mark.parametrize("text", SPECS)
def test_results_are_those_of_rounded_rows_and_weights(dense, text):
    spec = QuantSpec.parse(text)
    converted, op = convert(dense, make_weight_only(spec))
    structure = ADAPTOR.load(dense).structure
    weight, bias = structure.get_weight(op), structure.find_bias(op)
    stored = round_weight(weight, spec.dtype.bits, spec.group_size or weight.shape[1])
    expected = round_rows(DRAWN) @ stored.T + structure.program.get_constant(bias)
    result = run_litert(ADAPTOR.native(converted), DRAWN)[0]
    # A step of an input that is halfway between two may go either way.
    step = np.ptp(DRAWN, axis=1, keepdims=True) / 255 * np.abs(stored).max()
    assert (np.abs(result - expected) <= step).all()
    assert np.abs(result - expected).mean() < 0.02 * step.mean()


def test_results_of_a_weight_in_fp16_are_those_of_the_rounded_weight(dense):
    half = next(c for c in capability(dense).configs if c.precision is Precision.FP16)
    converted, op = convert(dense, half)
    structure = ADAPTOR.load(dense).structure
    weight = structure.get_weight(op).astype(np.float16).astype(np.float32)
    expected = DRAWN @ weight.T + structure.program.get_constant(structure.find_bias(op))
    np.testing.assert_allclose(ADAPTOR.predict(converted, DRAWN), expected, atol=1e-5)


def test_every_block_of_the_quantizer_and_whole_rows_are_offered(dense):
    configs = [c for c in capability(dense).configs if c.precision is Precision.INT4]
    assert [c.weight.group_size for c in configs] == [128, 64, 32, 256]
    assert {str(c.weight.inputs) for c in configs} == {"int8_inputs"}


@pytest.fixture(scope="module")
def digits_net():
    """A net with a large dense layer."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(8, 3, activation="relu", name="stem")(image)
    x = layers.Dense(64, "relu", name="wide")(layers.Flatten()(x))
    return as_litert(keras.Model(image, layers.Dense(10, name="head")(x)))


MIXED = {"stem": "int8", "wide": "int4", "head": "fp16"}


@pytest.fixture(scope="module", params=["int4", "fp16", "mixed"])
def small(request, digits_net, digits):
    """A model searched for size in one precision, or with another for each layer."""
    converter = MixedPrecision(
        model=digits_net, objective="modelsize", calib_dataloader=digits[0].loader()
    )
    converter.precisions = "int4,int8,fp16" if request.param == "mixed" else request.param
    if request.param == "mixed":
        converter.op_wise = {op: {"precisions": [precision]} for op, precision in MIXED.items()}
        converter.approach = "weight_only"
    return converter(), request.param


def test_the_precisions_that_are_asked_for_are_used(small):
    result, asked = small
    expected = {"int4": {"int4": 2, "fp32": 1}, "fp16": {"fp16": 3}}
    assert result.plan.counts() == expected.get(asked, {"int4": 1, "int8": 1, "fp16": 1})
    assert "emulated" not in str(result.report.warnings)


def test_the_file_is_smaller_and_holds_the_results(small, digits, digits_net, tmp_path):
    result, asked = small
    path, images = tmp_path / "small.tflite", digits[1].images
    result.save(path)
    assert path.stat().st_size < len(digits_net) * (0.6 if asked == "fp16" else 0.4)
    np.testing.assert_array_equal(run_litert(path.read_bytes(), images)[0], result(images))


def test_the_audit_confirms_the_kernels(small):
    audit = small[0].audit()
    assert audit.holds, [(op.name, op.verdict) for op in audit.findings]
    in_half = {op.verdict for op in audit.ops if op.planned.precision is Precision.FP16}
    assert in_half <= {Verdict.EMULATED}


def test_a_saved_folder_and_the_quantizer_alone_give_the_same_results(
    small, digits, digits_net, tmp_path
):
    from ai_edge_quantizer import quantizer
    from ai_edge_quantizer.utils import calibration_utils

    result, images = small[0], digits[1].images
    result.save(tmp_path / "result")
    np.testing.assert_array_equal(neural_mp.load(tmp_path / "result")(images), result(images))
    tool = quantizer.Quantizer(digits_net)
    tool.load_quantization_recipe(str(tmp_path / "result" / "recipe.json"))
    path = tmp_path / "result" / "calibration.json"
    spans, _ = calibration_utils.load_calibration_results(str(path))
    replayed = bytes(tool.quantize(spans, enable_progress_report=False).quantized_model)
    np.testing.assert_array_equal(run_litert(replayed, images)[0], result(images))


def test_tf_lite_reads_the_file(small, digits, tmp_path):
    import tensorflow as tf

    path, images = tmp_path / "small.tflite", digits[1].images
    small[0].save(path)
    runner = tf.lite.Interpreter(str(path)).get_signature_runner("serving_default")
    (output,) = runner(image=images).values()
    # Kernels of floats may sum in another order.
    np.testing.assert_allclose(output, small[0](images), atol=1e-6)


def test_a_weight_beyond_the_range_of_fp16_stays_in_float():
    rows = keras.Input((8,))
    net = keras.Model(
        rows, layers.Dense(8, kernel_initializer=keras.initializers.Constant(1e5))(rows)
    )
    reason = capability(as_litert(net)).reasons[Precision.FP16]
    assert reason == "its weight exceeds the range of fp16"


def embed(rows: int = 50, width: int = 32) -> keras.Model:
    """Return a net that looks up rows of a table by their numbers."""
    keras.utils.set_random_seed(0)
    numbers = keras.Input((7,), dtype="int32", name="numbers")
    x = layers.GlobalAveragePooling1D()(layers.Embedding(rows, width, name="table")(numbers))
    return keras.Model(numbers, layers.Dense(4)(x))


@pytest.fixture(scope="module")
def embedded():
    """The file of such a net, and numbers of which some rows are in no batch."""
    numbers = np.random.default_rng(0).integers(0, 20, (16, 7)).astype(np.int32)
    return as_litert(embed()), numbers


@pytest.mark.parametrize(("approach", "decibels"), [("weight_only", 30), ("static", 15)])
def test_the_table_of_a_keras_embedding_is_stored_in_bytes(embedded, approach, decibels, tmp_path):
    content, numbers = embedded
    converter = MixedPrecision(
        model=content, precisions="int8", objective="modelsize", calib_dataloader=[numbers]
    )
    if approach == "weight_only":
        converter.approach = approach
    result = converter()
    assert {op.planned.type for op in result.audit().ops if op.planned.precision == "int8"} >= {
        "GATHER"
    }
    assert result.audit().holds
    # Also rows that calibration did not see, although static ranges of results clip these.
    unseen = np.random.default_rng(1).integers(20, 50, (16, 7)).astype(np.int32)
    (expected,) = run_litert(content, unseen)
    assert signal_to_noise(expected, result(unseen)) > decibels
    result.save(tmp_path / "result")
    assert (tmp_path / "result" / "model.tflite").stat().st_size < len(content) - 50 * 32 * 2
    np.testing.assert_array_equal(neural_mp.load(tmp_path / "result")(unseen), result(unseen))
