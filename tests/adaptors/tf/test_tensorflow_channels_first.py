"""Graphs with channels first, as frozen for GPUs, get the INT8 of channels last."""

import numpy as np
import pytest
import tensorflow as tf
from machine import machine

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

v1 = tf.compat.v1
RNG = np.random.default_rng(0)
FIRST, LAST = "NCHW", "NHWC"
IMAGES = RNG.normal(size=(2, 3, 12, 10)).astype(np.float32)


def drawn(*shape):
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(np.float32)


def axes(layout, rows, channels):
    """A value per axis in a layout, of height, width and channels."""
    return [1, *rows, channels] if layout == LAST else [1, channels, *rows]


def convolution(x, layout, inputs, outputs, stride=1, padding="SAME"):
    x = tf.nn.conv2d(
        x, drawn(3, 3, inputs, outputs), axes(layout, [stride] * 2, 1), padding, layout
    )
    return tf.nn.bias_add(x, drawn(outputs), data_format=layout)


def residual(x, layout):
    x = tf.nn.relu(convolution(x, layout, 3, 8))
    x = tf.nn.max_pool2d(x, 3, 2, "SAME", layout)
    y = convolution(x, layout, 8, 8, padding="SAME")
    norm = drawn(8), drawn(8), drawn(8), np.abs(drawn(8)) + 1
    y = v1.nn.fused_batch_norm(y, *norm, is_training=False, data_format=layout)[0]
    return tf.reduce_mean(tf.nn.relu(x + y), [1, 2] if layout == LAST else [2, 3])


def joined(x, layout):
    x = convolution(x, layout, 3, 8, 2, "VALID")
    depthwise = axes(layout, [1, 1], 1)
    y = tf.nn.depthwise_conv2d(x, drawn(3, 3, 8, 1), depthwise, "SAME", layout)
    x = tf.concat([tf.nn.relu6(y), tf.nn.avg_pool2d(x, 2, 1, "SAME", layout)], layout.find("C"))
    pads = [[0, 0]] * 4
    pads[layout.find("H")] = pads[layout.find("W")] = [1, 2]
    return convolution(tf.pad(x, pads), layout, 16, 4, padding="VALID")


def flattened(x, layout):
    x = tf.nn.relu(convolution(x, layout, 3, 4))
    x = tf.split(x, 2, layout.find("C"))[1] * 0.5
    x = tf.transpose(x, [0, 3, 1, 2]) if layout == LAST else x
    return tf.matmul(tf.reshape(x, [-1, 240]), drawn(240, 5))


def dynamic(x, layout):
    """A size that depends on the image."""
    x = convolution(x, layout, 3, 4, 2)
    rows = tf.shape(x)[layout.find("H")]
    return convolution(x, layout, 4, 4) / tf.cast(rows, tf.float32)


NETS = (residual, joined, flattened, dynamic)


def graph_of(net, layout, shape):
    with tf.Graph().as_default() as graph:
        x = v1.placeholder(tf.float32, shape, name="x")
        y = net(x if layout == FIRST else tf.transpose(x, [0, 2, 3, 1]), layout)
        if layout == LAST and y.shape.rank == 4:
            y = tf.transpose(y, [0, 3, 1, 2])
        tf.identity(y, "y")
    return graph


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_channels_first_get_the_int8_of_channels_last(net):
    adaptor, results = TensorFlowAdaptor(), {}
    shape = [None, 3, None, None] if net is dynamic else [None, *IMAGES.shape[1:]]
    for layout in (FIRST, LAST):
        model = adaptor.load(graph_of(net, layout, shape), example=IMAGES)
        assert {node.device for node in model.graph.nodes.values()} == {""}
        space = adaptor.space(model, machine())
        plan = space.resolve(uniform(space, Precision.INT8))
        observed = adaptor.observe(model, [IMAGES], space)
        converted = adaptor.convert(model, plan, observed, space)
        outputs = [adaptor.predict(form, IMAGES) for form in (model, converted)]
        results[layout] = *outputs, plan.plan.counts()
    (exact, quantized, counts), (expected, _, expected_counts) = results[FIRST], results[LAST]
    assert counts == expected_counts
    assert counts["int8"]
    np.testing.assert_allclose(exact, expected, rtol=1e-4, atol=1e-3)
    assert signal_to_noise(expected, quantized) > 25
