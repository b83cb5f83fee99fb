"""INT8 inputs and outputs: names, values and readers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras import layers
from litert_nets import as_litert

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import ConfigurationError
from neural_mp.testing import signal_to_noise


def tune(model, batches, **options):
    """Return a result with integer inputs and outputs."""
    options = {"precisions": "int8", "objective": "modelsize", "io": "int8", **options}
    return MixedPrecision(model=model, calib_dataloader=batches, **options)()


def make_two_ports() -> bytes:
    """A file with two inputs and two outputs, of which each has ops without an INT8 kernel."""
    keras.utils.set_random_seed(0)
    image, extra = keras.Input((8, 8, 1), name="image"), keras.Input((4,), name="extra")
    x = layers.GlobalAveragePooling2D()(layers.Conv2D(8, 3, activation="relu")(image))
    x = layers.Concatenate()([x, layers.Dense(4)(layers.Softmax()(extra))])
    return as_litert(keras.Model([image, extra], [layers.Dense(3)(x), layers.Softmax()(x)]))


@pytest.fixture(scope="module")
def batches():
    draw = np.random.default_rng(0)
    return [
        {
            "image": draw.random((16, 8, 8, 1), np.float32),
            "extra": draw.normal(size=(16, 4)).astype(np.float32),
        }
        for _ in range(4)
    ]


@pytest.fixture(scope="module")
def several(batches):
    content = make_two_ports()
    return content, tune(content, batches)


def run_in_integers(interpreter, feeds):
    """Return the outputs of a plain interpreter for float inputs, by its own scales."""
    runner = interpreter.get_signature_runner("serving_default")
    details = runner.get_input_details()
    integers = {}
    for name, values in feeds.items():
        scale, zero = details[name]["quantization"]
        assert details[name]["dtype"] is np.int8
        steps = np.rint(values / np.float32(scale)) + zero
        integers[name] = np.clip(steps, -128, 127).astype(np.int8)
    results = {}
    for name, output in runner(**integers).items():
        scale, zero = runner.get_output_details()[name]["quantization"]
        assert output.dtype == np.int8
        results[name] = (output.astype(np.float32) - zero) * np.float32(scale)
    return results


def test_plain_interpreters_take_and_return_int8_under_the_names_of_the_source(
    several, batches, tmp_path
):
    import tensorflow as tf

    content, result = several
    path = tmp_path / "int8.tflite"
    result.save(path)
    before = Interpreter(model_content=content).get_signature_runner("serving_default")
    expected = result(batches[0])
    for reader in (Interpreter, tf.lite.Interpreter):
        outputs = run_in_integers(reader(str(path)), batches[0])
        assert list(outputs) == sorted(before.get_output_details())
        for output, value in zip(outputs.values(), expected, strict=True):
            np.testing.assert_allclose(output, value, atol=1e-6)


def test_openvino_reads_the_file(several, batches, tmp_path):
    ov = pytest.importorskip("openvino")
    _, result = several
    path = tmp_path / "int8.tflite"
    result.save(path)
    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    assert {port.get_element_type().get_type_name() for port in compiled.inputs} == {"i8"}


def test_the_result_takes_and_returns_floats(several, batches):
    content, result = several
    reference = MixedPrecision(
        model=content, precisions="int8", objective="modelsize", calib_dataloader=batches
    )()
    for output, value in zip(result(batches[0]), reference(batches[0]), strict=True):
        assert output.dtype == np.float32
        # Each value is rounded once more, if the output is in float inside.
        assert signal_to_noise(value, output) > 30
    assert result.audit().holds


def test_a_saved_folder_gives_the_same_outputs(several, batches, tmp_path):
    _, result = several
    result.save(tmp_path / "result")
    loaded = neural_mp.load(tmp_path / "result")
    for output, value in zip(loaded(batches[0]), result(batches[0]), strict=True):
        np.testing.assert_array_equal(output, value)
    assert loaded.audit().holds


def test_nothing_is_converted_at_ports_that_integer_kernels_read_and_write(net, digits):
    result = tune(net, digits[0].loader())
    assert result.report.conversions.quantize + result.report.conversions.dequantize == 0


def test_the_accuracy_is_that_with_integers(net, digits):
    result = tune(net, digits[0].loader(), metric="accuracy", eval_dataloader=digits[1].loader())
    images, labels = digits[1].images, digits[1].labels
    assert result.report.accuracy == pytest.approx((result(images).argmax(1) == labels).mean())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"framework": "tensorflow"}, "io='int8' is for LiteRT"),
        ({"framework": "litert", "calib_dataloader": None}, "set calib_dataloader"),
        ({"framework": "litert", "io": "int4"}, "io must be"),
    ],
)
def test_what_cannot_have_integer_ports_is_refused_before_the_search(
    keras_net, digits, options, message
):
    options = {"calib_dataloader": digits[0].loader(), "io": "int8", **options}
    with pytest.raises(ConfigurationError, match=message):
        MixedPrecision(model=keras_net, approach="weight_only", **options)()
