"""Graphs trained with fake quantization: their ranges are read, and their ops run in integers."""

from collections import Counter

import numpy as np
import pytest
import tensorflow as tf
from machine import machine

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

v1 = tf.compat.v1
IMAGES = np.random.default_rng(0).normal(size=(4, 12, 12, 3)).astype(np.float32)
vars_of = tf.quantization.fake_quant_with_min_max_vars


def drawn(*shape):
    return 0.3 * np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def rounded(weight):
    most = np.abs(weight).reshape(-1, weight.shape[-1]).max(0)
    return tf.quantization.fake_quant_with_min_max_vars_per_channel(
        weight, -most, most, narrow_range=True
    )


def convolution(x, inputs, outputs):
    x = tf.nn.conv2d(x, rounded(drawn(3, 3, inputs, outputs)), 1, "SAME")
    return tf.nn.bias_add(x, drawn(outputs))


def residual(x):
    """Fake quantization of every tensor, as tools for quantization-aware training insert."""
    x = vars_of(x, -4.0, 4.0)
    x = vars_of(tf.nn.relu6(convolution(x, 3, 8)), 0.0, 6.0, name="first")
    y = vars_of(convolution(x, 8, 8), -8.0, 8.0)
    x = vars_of(tf.nn.relu(x + y), 0.0, 10.0, name="sum")
    x = vars_of(tf.reduce_mean(x, [1, 2]), 0.0, 4.0)
    return vars_of(tf.matmul(x, rounded(drawn(8, 5))), -3.0, 3.0)


def clipped(x):
    """Ranges from 0 on in the place of activations."""
    x = tf.quantization.fake_quant_with_min_max_args(x, -4.0, 4.0)
    x = vars_of(convolution(x, 3, 8), 0.0, 6.0, name="first")
    return tf.reduce_mean(convolution(x, 8, 4), [1, 2])


NETS = {net.__name__: net for net in (residual, clipped)}


def graph_of(net):
    with tf.Graph().as_default() as graph:
        tf.identity(net(v1.placeholder(tf.float32, [None, 12, 12, 3], name="x")), "y")
    return graph


def as_graph(net, folder):
    return graph_of(net)


def as_saved_model(net, folder):
    spec = tf.TensorSpec([None, 12, 12, 3], name="x")
    run = tf.function(lambda x: {"y": net(x)}, input_signature=[spec])
    tf.saved_model.save(tf.Module(), str(folder / "saved"), signatures=run)
    return folder / "saved"


def run_plainly(graph):
    with v1.Session(graph=graph) as session:
        return session.run("y:0", {"x:0": IMAGES})


def all_int8(adaptor, model):
    space = adaptor.space(model, machine())
    observed = adaptor.observe(model, [IMAGES], space)
    plan = space.resolve(uniform(space, Precision.INT8))
    return adaptor.convert(model, plan, observed, space), plan.plan.counts(), observed


@pytest.mark.slow
@pytest.mark.parametrize("source", [as_graph, as_saved_model])
@pytest.mark.parametrize("name", NETS)
def test_layers_run_in_integers_within_the_ranges_of_training(tmp_path, name, source):
    adaptor, expected = TensorFlowAdaptor(), run_plainly(graph_of(NETS[name]))
    model = adaptor.load(source(NETS[name], tmp_path), example=IMAGES)
    np.testing.assert_allclose(adaptor.predict(model, IMAGES), expected, rtol=1e-4, atol=1e-4)
    converted, counts, observed = all_int8(adaptor, model)
    assert counts["int8"] == (3 if name == "residual" else 2)
    ranges = [bounds["minmax"] for bounds in observed.ranges.values()]
    for span in ((0, 6), (0, 10)) if name == "residual" else ((0, 6),):
        assert any(np.allclose(span, bounds) for bounds in ranges)
    ops = Counter(node.op for node in converted.graph.nodes.values())
    # Only that of the result stays: no layer follows.
    assert sum(ops[op] for op in ops if op.startswith("FakeQuant")) == (name == "residual")
    assert ops["QuantizeV2"] == (2 if name == "residual" else 1)
    assert not ops["Add"] + ops["AddV2"]
    assert signal_to_noise(expected, adaptor.predict(converted, IMAGES)) > 25


def test_fewer_bits_than_integer_kernels_have_stay():
    def net(x):
        return convolution(vars_of(x, -3.0, 3.0, num_bits=2), 3, 4)

    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph_of(net), example=IMAGES)
    assert "FakeQuantWithMinMaxVars" in {node.op for node in model.graph.nodes.values()}
    converted, counts, _ = all_int8(adaptor, model)
    assert counts == {"int8": 1}
    expected = run_plainly(graph_of(net))
    assert signal_to_noise(expected, adaptor.predict(converted, IMAGES)) > 25


def test_a_clipping_that_the_outputs_depend_on_stays():
    def net(x):
        return tf.nn.softplus(vars_of(x * 100.0, -0.5, 0.5)) @ tf.eye(3)

    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph_of(lambda x: net(tf.reshape(x, [-1, 3]))), example=IMAGES)
    assert "FakeQuantWithMinMaxVars" in {node.op for node in model.graph.nodes.values()}
    assert any("stays in floats, because the outputs differ" in text for text in model.warnings)
