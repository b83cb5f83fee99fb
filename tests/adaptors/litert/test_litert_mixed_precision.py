"""The object a user drives, on LiteRT files, and what other readers make of the results."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from keras_nets import ChannelsLast
from litert_nets import as_litert, run_litert

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.testing import ApiContract, ModelFormContract


class OnLiteRt(ChannelsLast):
    framework = "litert"
    native = bytes
    convolution = "CONV_2D"

    @pytest.fixture
    def reference(self, net, digits):
        return run_litert(net, digits[1].images)[0]


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
class TestApi(OnLiteRt, ApiContract):
    # LiteRT has no kernels in 16 bits for CPUs.
    test_a_metric_and_data = test_a_model_alone = test_bf16_alone_without_hardware_is_refused = None

    @pytest.fixture
    def model(self, net):
        return net

    @pytest.fixture
    def hostile_net(self, hostile_file):
        return hostile_file


@pytest.mark.slow
@pytest.mark.usefixtures("quick_runs")
class TestFile(OnLiteRt, ModelFormContract):
    test_a_metric_and_data = None

    @pytest.fixture
    def model(self, net, tmp_path):
        path = tmp_path / "digits.tflite"
        path.write_bytes(net)
        return str(path)


@pytest.fixture(scope="module")
def quantized(net, digits):
    converter = MixedPrecision(objective="modelsize")
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    converter.model = net
    return converter()


def test_a_saved_file_runs_in_plain_litert_and_tf_lite(quantized, digits, tmp_path):
    import tensorflow as tf

    path, images = tmp_path / "int8.tflite", digits[1].images
    quantized.save(path)
    expected = quantized(images)
    np.testing.assert_array_equal(run_litert(path.read_bytes(), images)[0], expected)
    interpreter = tf.lite.Interpreter(str(path))
    runner = interpreter.get_signature_runner("serving_default")
    (output,) = runner(image=images).values()
    np.testing.assert_array_equal(output, expected)


def test_a_saved_file_is_read_by_openvino(quantized, digits, tmp_path):
    ov = pytest.importorskip("openvino")
    path, images = tmp_path / "int8.tflite", digits[1].images
    quantized.save(path)
    compiled = ov.Core().compile_model(path, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    output = compiled(images)[0]
    assert (output.argmax(1) == quantized(images).argmax(1)).mean() > 0.97


def test_a_saved_folder_gives_the_same_outputs(quantized, digits, tmp_path):
    images = digits[1].images
    quantized.save(tmp_path / "result")
    loaded = neural_mp.load(tmp_path / "result")
    np.testing.assert_array_equal(loaded(images), quantized(images))
    assert loaded.plan == quantized.plan


def test_a_keras_model_is_converted_for_litert(keras_net, digits):
    images = digits[1].images
    result = MixedPrecision(
        model=keras_net,
        framework="litert",
        precisions="int8",
        objective="modelsize",
        calib_dataloader=digits[0].loader(),
    )()
    expected = keras_net.predict(images, verbose=0)
    assert (result(images).argmax(1) == expected.argmax(1)).mean() > 0.97
    assert result.framework == "litert"


def test_ai_edge_quantizer_alone_replays_a_saved_recipe(quantized, net, digits, tmp_path):
    from ai_edge_quantizer import quantizer
    from ai_edge_quantizer.utils import calibration_utils

    quantized.save(tmp_path / "result")
    tool = quantizer.Quantizer(net)
    tool.load_quantization_recipe(str(tmp_path / "result" / "recipe.json"))
    path = tmp_path / "result" / "calibration.json"
    spans, _ = calibration_utils.load_calibration_results(str(path))
    replayed = bytes(tool.quantize(spans, enable_progress_report=False).quantized_model)
    images = digits[1].images
    np.testing.assert_array_equal(run_litert(replayed, images)[0], quantized(images))


def test_a_result_under_two_names_is_in_float_under_both(digits, tmp_path):
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1), name="image")
    scores = keras.layers.Dense(10)(keras.layers.Flatten()(image))
    source = as_litert(keras.Model(image, [scores, scores]))
    result = MixedPrecision(
        model=source,
        precisions="int8",
        objective="modelsize",
        calib_dataloader=digits[0].loader(),
    )()
    path, images = tmp_path / "twice.tflite", digits[1].images[:4]
    result.save(path)
    runner = Interpreter(str(path)).get_signature_runner("serving_default")
    outputs = list(runner(image=images[:1]).values())
    assert len(outputs) == 2
    for output in outputs:
        np.testing.assert_array_equal(output, result(images[:1])[0])
