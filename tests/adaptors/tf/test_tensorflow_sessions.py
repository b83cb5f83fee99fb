"""Sessions of TensorFlow graphs: fused ops, constants, and runs with and without statistics."""

import collections

import keras
import numpy as np
import pytest
import tensorflow as tf

from neural_mp.adaptors.tensorflow import runtime
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor

layers = keras.layers


def of_images():
    """A convolutional net, one of whose weights is large, and a batch."""
    image = keras.Input((8, 8, 16))
    x = layers.Conv2D(128, 3, activation="relu", bias_initializer="ones")(image)
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10, bias_initializer="ones")(x)), (4, 8, 8, 16)


def of_rows():
    """A recurrent net, whose weights are constants within a loop, and a batch."""
    rows = keras.Input((6, 32))
    return keras.Model(rows, layers.Dense(10)(layers.GRU(96)(rows))), (4, 6, 32)


def run(make):
    keras.utils.set_random_seed(0)
    net, shape = make()
    data = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    model = TensorFlowAdaptor().load(net, example=data)
    return net, model, data


@pytest.mark.parametrize("make", [of_images, of_rows])
def test_a_fused_graph_gives_what_the_net_gives(make):
    net, model, data = run(make)
    (found,) = model.run(model.signature.bind(data))
    np.testing.assert_allclose(found, net(data), rtol=1e-4, atol=1e-5)


def test_ops_are_fused_and_weights_are_constants_before_the_session():
    """A session that fuses would copy the weights three times more."""
    _, model, _ = run(of_images)
    ops = collections.Counter(node.op for node in model.runner._session.graph_def.node)
    assert (ops["_FusedConv2D"], ops["_FusedMatMul"]) == (1, 1)
    assert (ops["Conv2D"], ops["MatMul"], ops["Placeholder"]) == (0, 0, 1)


def test_a_large_graph_runs_again_after_runs_with_statistics(monkeypatch):
    """Compiled for one purpose at a time, it holds its weights once."""
    monkeypatch.setattr(runtime, "_LARGE_GRAPH_BYTES", 0)
    _, model, data = run(of_images)
    feeds, outputs = model.signature.bind(data), model.signature.output_tensors
    (before,) = model.run(feeds)
    assert len(list(model.runner.traced(feeds, outputs, 2))) == 2
    assert not model.runner._callables
    (after,) = model.run(feeds)
    np.testing.assert_array_equal(before, after)


def test_bf16_convolutions_are_fused_by_the_session():
    """Outside of a session, there is no such op."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.bfloat16, (1, 4, 4, 2), name="x")
        tf.identity(tf.nn.relu(tf.nn.conv2d(x, tf.ones((3, 3, 2, 2), tf.bfloat16), 1, "SAME")), "y")
    written = runtime.TensorGraph.from_graph_def(graph.as_graph_def())
    images = np.ones((1, 4, 4, 2), tf.bfloat16.as_numpy_dtype)
    (found,) = runtime.compiled(written, {}, ["x"], ["y"])({"x": images}, ["y"])
    assert found[0, 1, 1].tolist() == [18, 18]
