"""Floats for integer inputs of a TensorFlow model, as image pipelines produce for detectors."""

import logging

import numpy as np
import pytest

import neural_mp
from neural_mp.api.loading import load_source
from neural_mp.errors import DataError

tf = pytest.importorskip("tensorflow")
v1 = tf.compat.v1


@pytest.fixture(scope="module")
def graph():
    """A frozen graph: a convolution of a uint8 image, and a shift of the same image."""
    rng = np.random.default_rng(0)
    with tf.Graph().as_default() as tf_graph:
        image = v1.placeholder(tf.uint8, (None, 8, 8, 3), name="image_tensor")
        kernel = rng.normal(size=(3, 3, 3, 8)).astype(np.float32)
        tf.nn.relu(tf.nn.conv2d(tf.cast(image, tf.float32), kernel, 1, "SAME"), name="out")
    return tf_graph.as_graph_def()


def pictures(count=4):
    return np.random.default_rng(1).uniform(0, 255, (count, 8, 8, 3)).astype(np.float32)


def test_floats_are_cast_as_a_session_casts_them(graph, caplog):
    images = pictures()
    model = load_source(graph, None, None)
    with tf.Graph().as_default() as tf_graph, v1.Session() as session:
        tf.import_graph_def(graph, name="")
        expected = session.run(tf_graph.get_tensor_by_name("out:0"), {"image_tensor:0": images})
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            np.testing.assert_array_equal(model(images), expected)
    warned = [line for line in caplog.messages if "floats for integer inputs" in line]
    assert len(warned) == 1


@pytest.mark.parametrize("value", [256.0, -1.0, np.nan, np.inf])
def test_a_number_out_of_range_is_an_error(graph, value):
    images = pictures()
    images[1, 2, 3, 0] = value
    with pytest.raises(DataError, match="float32 for the input image_tensor: uint8"):
        load_source(graph, None, None)(images)


def test_a_detector_is_tuned_on_floats(graph, quick_runs):
    tuning = neural_mp.MixedPrecision()
    tuning.precisions = "int8"
    tuning.model = graph
    tuning.calib_dataloader = [(pictures(), np.zeros(4))]
    tuning.exit_policy = neural_mp.ExitPolicy(performance_only=True)
    result = tuning.fit()
    np.testing.assert_array_equal(result(pictures()).shape, (4, 8, 8, 8))
