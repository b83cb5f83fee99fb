"""Converted models in files: the signature they came with, run by TensorFlow itself."""

import json
import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from google.protobuf import text_format

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.errors import ModelLoadError
from neural_mp.testing import uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8

ALONE = """
import sys, numpy as np
images = np.load("images.npy")
import tensorflow as tf
run = tf.saved_model.load("saved").signatures["serving_default"]
(name,) = run.structured_input_signature[1]
np.save("tensorflow.npy", next(iter(run(**{name: tf.constant(images)}).values())).numpy())
assert "neural_mp" not in sys.modules
import neural_mp
np.save("neural_mp.npy", neural_mp.load("saved")(images))
"""


@pytest.fixture(scope="module")
def tuned(net, digits, tmp_path_factory):
    """The small trained net in INT8; must not be changed."""
    converter = MixedPrecision()
    converter.model = net
    converter.precisions = "int8"
    converter.workspace = tmp_path_factory.mktemp("workspace")
    converter.calib_dataloader = digits[0].loader()
    return converter()


def signatures_of(folder):
    """Signature → names, types and shapes of its inputs and outputs."""

    def described(ports):
        return {name: (port.dtype, port.shape.as_list()) for name, port in ports.items()}

    return {
        name: (described(run.structured_input_signature[1]), described(run.structured_outputs))
        for name, run in tf.saved_model.load(str(folder)).signatures.items()
    }


def test_the_signature_is_the_one_that_came_in(net, digits, tmp_path):
    net.export(tmp_path / "given", verbose=False)
    converter = MixedPrecision()
    converter.model = str(tmp_path / "given")
    converter.precisions = "int8"
    converter.calib_dataloader = digits[0].loader()
    result = converter()
    result.save(tmp_path / "saved")
    signatures = signatures_of(tmp_path / "given")
    assert signatures_of(tmp_path / "saved") == signatures
    assert signatures["serving_default"][0] == {"image": (tf.float32, [None, 8, 8, 1])}
    assert not [warning for warning in result.report.warnings if "signature" in warning]


def test_it_runs_in_a_fresh_process_with_us_and_without(tuned, digits, tmp_path):
    images = digits[1].images[:30]
    expected = tuned(images)
    tuned.save("saved")
    np.save("images.npy", images)
    subprocess.run([sys.executable, "-c", ALONE], check=True, capture_output=True)
    for who in ("neural_mp", "tensorflow"):
        np.testing.assert_allclose(np.load(f"{who}.npy"), expected, atol=1e-6)


def test_the_old_way_of_serving_loads_it_by_tag_and_tensor_names(tuned, digits):
    tuned.save("saved")
    images = digits[1].images[:5]
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        meta = tf.compat.v1.saved_model.load(session, ["serve"], "saved")
        definition = meta.signature_def["serving_default"]
        assert definition.method_name == "tensorflow/serving/predict"
        (feed,), (result,) = definition.inputs.values(), definition.outputs.values()
        outputs = session.run(result.name, {feed.name: images})
    np.testing.assert_allclose(outputs, tuned(images), atol=1e-6)


@pytest.mark.parametrize("suffix", ["pb", "pbtxt"])
def test_a_frozen_graph_if_asked_for(tuned, digits, suffix):
    tuned.save(f"out/net.{suffix}")
    graph = tf.compat.v1.GraphDef()
    if suffix == "pb":
        graph.ParseFromString(Path("out/net.pb").read_bytes())
    else:
        text_format.Parse(Path("out/net.pbtxt").read_text(), graph)
    images = digits[1].images[:5]
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        tf.graph_util.import_graph_def(graph, name="")
        names = [node.name for node in graph.node if node.op == "Placeholder"]
        outputs = session.run("Identity:0", {f"{names[0]}:0": images})
    np.testing.assert_allclose(outputs, tuned(images), atol=1e-6)


def test_the_native_model_is_called_predicted_with_and_saved_like_any(tuned, digits):
    images = digits[1].images[:70]
    expected = tuned(images)
    model = tuned.model
    assert isinstance(model, tf.Module)
    np.testing.assert_allclose(model(images).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(model(image=images).numpy(), expected, atol=1e-6)
    np.testing.assert_allclose(model.predict(images, batch_size=32), expected, atol=1e-6)
    np.testing.assert_allclose(model.predict_on_batch(images), expected, atol=1e-6)
    served = model.signatures["serving_default"]
    (name,) = served.structured_outputs
    np.testing.assert_allclose(served(tf.constant(images))[name].numpy(), expected, atol=1e-6)
    tf.saved_model.save(model, "by_tensorflow", signatures=model.serving_signatures)
    run = tf.saved_model.load("by_tensorflow").signatures["serving_default"]
    (outputs,) = run(image=tf.constant(images)).values()
    np.testing.assert_allclose(outputs.numpy(), expected, atol=1e-6)
    assert len(model.graph_def.node) > 10


def test_users_data_is_not_in_the_file(tuned, digits):
    tuned.save("saved")
    details = json.loads(Path("saved/details.json").read_text())
    assert list(details["example"].values()) == [[100, 8, 8, 1]]
    assert neural_mp.load("saved").adaptor.example_inputs(neural_mp.load("saved").held)[0].any()


def test_int8_shrinks_the_file(net, tuned, tmp_path):
    net.export(tmp_path / "fp32", verbose=False)
    tuned.save(tmp_path / "int8")
    sizes = [
        sum(file.stat().st_size for file in (tmp_path / name).rglob("*") if file.is_file())
        for name in ("fp32", "int8")
    ]
    assert tuned.report.size < 0.35 * tuned.report.baseline_size
    assert sizes[1] < sizes[0]


def test_files_that_were_cut_or_emptied_are_refused(tuned):
    tuned.save("saved")
    adaptor = TensorFlowAdaptor()
    file = Path("saved/saved_model.pb")
    file.write_bytes(file.read_bytes()[:999])
    with pytest.raises(ModelLoadError, match="changed or damaged"):
        neural_mp.load("saved")
    with pytest.raises(ModelLoadError, match="missing or damaged"):
        adaptor.restore(Path("saved"))


def test_a_converted_model_is_converted_no_second_time(tuned, all_machine):
    tuned.save("net.pb")
    adaptor = TensorFlowAdaptor()
    again = adaptor.load("net.pb")
    space = adaptor.space(again, all_machine)
    assert not space.int8_ops
    assert uniform(space, INT8) == space.fp32_plan()


def test_keras_files_with_code_in_them_are_refused(tmp_path):
    inputs = keras.Input((2,))
    net = keras.Model(inputs, keras.layers.Lambda(lambda x: x * 2)(inputs))
    net.save(tmp_path / "net.keras")
    with pytest.raises(ModelLoadError, match="cannot be read as a Keras model.*Lambda|unsafe"):
        TensorFlowAdaptor().load(tmp_path / "net.keras")
