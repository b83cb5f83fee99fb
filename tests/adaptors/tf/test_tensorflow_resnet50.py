"""ResNet-50, untrained: what runs in what, how many conversions, how near to FP32."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.observations import Observations
from neural_mp.core.precision import FP32, Precision
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

BF16, INT8 = Precision.BF16, Precision.INT8


@pytest.fixture(scope="module")
def images():
    return np.random.default_rng(0).standard_normal((2, 64, 64, 3)).astype(np.float32)


@pytest.fixture(scope="module")
def held(images):
    keras.utils.set_random_seed(0)
    net = keras.applications.ResNet50(weights=None, input_shape=(64, 64, 3))
    draw = np.random.default_rng(0)
    for layer in net.layers:
        if isinstance(layer, keras.layers.BatchNormalization):
            layer.set_weights([draw.uniform(0.5, 1.5, w.shape) for w in layer.get_weights()])
    return net, TensorFlowAdaptor().load(net, example=images)


@pytest.fixture(scope="module")
def space(held, all_machine):
    return TensorFlowAdaptor().space(held[1], all_machine)


@pytest.fixture(scope="module")
def observations(held, space, images):
    return TensorFlowAdaptor().observe(held[1], [images], space)


def types_of(model, op_type):
    nodes = model.graph.nodes.values()
    return [tf.as_dtype(n.attr["T"].type).name for n in nodes if n.op == op_type]


def test_preparing_changes_no_number(held, images):
    net, model = held
    expected = np.asarray(net(images, training=False))
    outputs = TensorFlowAdaptor().predict(model, images)
    assert np.abs(outputs - expected).max() / np.abs(expected).max() < 1e-4


def test_bf16_takes_two_casts_and_every_layer(held, space, images):
    """Within BF16 rounding of FP32.

    A number in BF16 is off by up to 2⁻⁹ of itself, and so is what every layer reads and writes.
    Independent errors of 54 layers, each with two inputs and a result, add to √(3·54)·2⁻⁹/√3, about
    1.4 % of the output, or 37 dB, were every layer to pass all of it on. Residual branches and sums
    over many inputs leave less: below that bound it must be.
    """
    adaptor = TensorFlowAdaptor()
    converted = adaptor.convert(held[1], space.resolve(uniform(space, BF16)), Observations(), space)
    assert converted.counts.casts == 2
    assert sum(node.op == "Cast" for node in converted.graph.nodes.values()) == 2
    assert types_of(converted, "Conv2D") == ["bfloat16"] * 53
    assert types_of(converted, "MatMul") == ["bfloat16"]
    ports = (*converted.signature.inputs, *converted.signature.outputs)
    assert {port.dtype for port in ports} == {np.dtype(np.float32)}
    expected, outputs = (adaptor.predict(m, images) for m in (held[1], converted))
    assert outputs.dtype == np.float32
    assert signal_to_noise(expected, outputs) > 37


def test_int8_stays_in_integers_from_the_image_to_the_pooling(held, space, observations, images):
    adaptor = TensorFlowAdaptor()
    converted = adaptor.convert(held[1], space.resolve(uniform(space, INT8)), observations, space)
    ops = [node.op for node in converted.graph.nodes.values()]
    assert ops.count("_FusedQuantizedConv2D") == 53
    assert ops.count("_QuantizedMatMul") == 1
    # The image and the pooled features go in; the last feature map comes out.
    assert (ops.count("QuantizeV2"), ops.count("Dequantize")) == (2, 1)
    expected, outputs = (adaptor.predict(m, images) for m in (held[1], converted))
    assert signal_to_noise(expected, outputs) > 25


def test_three_precisions_in_one_graph(held, space, observations, images):
    """INT8 up to the third stage, BF16 behind it, FP32 at the end; conversions only between."""
    adaptor = TensorFlowAdaptor()
    plan = uniform(space, INT8)
    late = [op for op in space.tunable_ops if "conv4" in op or "conv5" in op]
    plan = plan.replacing({op: space.capabilities[op].config(BF16) for op in late})
    dense = next(op for op in space.tunable_ops if space.graph[op].type == "MatMul")
    plan = plan.replacing({dense: FP32})
    converted = adaptor.convert(held[1], space.resolve(plan), observations, space)
    counts = converted.counts
    assert (counts.quantize, counts.dequantize, counts.casts) == (1, 1, 1)
    (straight,) = [n for n in converted.graph.nodes.values() if n.op == "Dequantize"]
    assert tf.as_dtype(straight.attr["dtype"].type) is tf.bfloat16
    expected, outputs = (adaptor.predict(m, images) for m in (held[1], converted))
    assert signal_to_noise(expected, outputs) > 25
