"""Sessions of TensorFlow graphs: fused ops, constants, and runs with and without statistics."""

import collections
import subprocess
import sys

import keras
import numpy as np
import pytest
import tensorflow as tf

from neural_mp.adaptors.loaded_model import LoadedModel
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph import runtime

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
    (output,) = model.run(model.signature.bind_inputs(data))
    np.testing.assert_allclose(output, net(data), rtol=1e-4, atol=1e-5)


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
    feeds, outputs = model.signature.bind_inputs(data), model.signature.output_tensors
    (first,) = model.run(feeds)
    assert len(list(model.runner.trace_runs(feeds, outputs, 2))) == 2
    assert not model.runner._callables
    (second,) = model.run(feeds)
    np.testing.assert_array_equal(first, second)


def test_bf16_convolutions_are_fused_by_the_session():
    """Outside of a session, there is no such op."""
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.bfloat16, (1, 4, 4, 2), name="x")
        tf.identity(tf.nn.relu(tf.nn.conv2d(x, tf.ones((3, 3, 2, 2), tf.bfloat16), 1, "SAME")), "y")
    written = runtime.TensorGraph.from_graph_def(graph.as_graph_def())
    images = np.ones((1, 4, 4, 2), tf.bfloat16.as_numpy_dtype)
    (output,) = runtime.compile_runner(written, {}, ["x"], ["y"])({"x": images}, ["y"])
    assert output[0, 1, 1].tolist() == [18, 18]


def test_sessions_that_live_until_the_interpreter_ends_end_quietly():
    """Python deletes the modules that closing a session needs before the last objects."""
    program = """
import os
import numpy as np
import tensorflow as tf
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, import_runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import TensorGraph

graph = TensorGraph({})
graph.put_node("Placeholder", "x", dtype=tf.float32, shape=tf.TensorShape([1]))
graph.put_node("Neg", "y", ["x"], T=tf.float32)
os.runner = Runner(import_runnable(graph.to_graph_def()))
print(os.runner({"x": np.ones(1, "f4")}, ["y"])[0])
"""
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.stdout == "[-1.]\n"
    assert "Exception ignored" not in ended.stderr


def test_a_runner_that_is_deleted_closes_its_session():
    _, model, _ = run(of_images)
    session, runner = model.runner._session, model.__dict__.pop("runner")
    assert not session._closed
    del runner
    assert session._closed


def test_the_module_of_a_model_is_made_and_traced_once():
    spec = tf.TensorSpec((None, 4), tf.float32)
    function = tf.function(lambda x: tf.nn.relu(x) * 2.0, input_signature=[spec])
    adaptor = TensorFlowAdaptor()
    loaded = LoadedModel(adaptor, adaptor.load(function.get_concrete_function()))
    module = loaded.native
    assert loaded.native is module
    rows = np.eye(4, dtype=np.float32)
    np.testing.assert_array_equal(module(rows), loaded(rows))
    assert module._run.experimental_get_tracing_count() == 1
