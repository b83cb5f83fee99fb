"""Models that compute in 16 bits get INT8, and otherwise stay as given."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers
from machine import machine
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

IMAGES = np.random.default_rng(0).normal(size=(4, 16, 16, 3)).astype(np.float32)
HALVES = ["mixed_float16", "mixed_bfloat16", "float16"]
#: dB that products in bfloat16 reach with the same weights.
LEAST = 30


class Subclassed(keras.Model):
    """A model whose layers only its code connects."""

    def __init__(self):
        super().__init__()
        self.first = layers.Conv2D(8, 3, padding="same", activation="relu")
        self.norm = layers.BatchNormalization()
        self.last = layers.Dense(5, dtype="float32")

    def call(self, images):
        hidden = self.norm(self.first(images))
        scaled = tf.cast(hidden, self.compute_dtype) * tf.constant(0.5, self.compute_dtype)
        return self.last(tf.reduce_mean(scaled, (1, 2)))


def functional():
    x = inputs = Input((16, 16, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, padding="same", use_bias=False)(x))
    x = layers.MaxPooling2D()(layers.ReLU()(x))
    x = layers.ReLU()(layers.Add()([layers.Conv2D(8, 3, padding="same")(x), x]))
    x = layers.Flatten()(x)
    return Model(inputs, layers.Dense(5, dtype="float32")(layers.Dense(16, activation="relu")(x)))


def half_output():
    inputs = Input((16, 16, 3))
    return Model(inputs, layers.GlobalAveragePooling2D()(layers.Conv2D(4, 3)(inputs)))


def recurrent():
    inputs = Input((16, 16, 3))
    x = layers.LSTM(8)(layers.Reshape((16, 48))(inputs))
    return Model(inputs, layers.Dense(5, dtype="float32")(x))


OTHERS = ("Subclassed", "half_output", "recurrent")
NETS = {net.__name__: net for net in (functional, Subclassed, half_output, recurrent)}


def under(policy, make):
    """A net of the same weights under every policy."""
    keras.config.set_dtype_policy(policy)
    try:
        keras.utils.set_random_seed(0)
        net = make()
        net(IMAGES)
        return net
    finally:
        keras.config.set_dtype_policy("float32")


def all_int8(source, images=IMAGES):
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(source, example=images)
    space = adaptor.space(model, machine())
    observed = adaptor.observe(model, [images], space)
    plan = space.resolve(uniform(space, Precision.INT8))
    return adaptor, model, adaptor.convert(model, plan, observed, space), plan.plan.counts()


def as_object(net, folder):
    return net


def as_keras_file(net, folder):
    net.save(folder / "net.keras")
    return folder / "net.keras"


def as_saved_model(net, folder):
    net.export(folder / "exported", verbose=False)
    return folder / "exported"


def as_frozen_graph(net, folder):
    function = tf.function(lambda images: net(images, training=False))
    spec = tf.TensorSpec([None, *IMAGES.shape[1:]], name="images")
    return convert_variables_to_constants_v2(function.get_concrete_function(spec)).graph


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "policy"),
    [*(("functional", policy) for policy in HALVES), *((n, "mixed_float16") for n in OTHERS)],
)
def test_a_net_in_16_bits_gets_the_int8_of_its_float32_twin(name, policy):
    reference = under("float32", NETS[name])
    *_, expected_counts = all_int8(reference)
    net = under(policy, NETS[name])
    original = net(IMAGES)
    adaptor, model, converted, counts = all_int8(net)
    assert counts == expected_counts
    assert counts["int8"]
    outputs = adaptor.predict(converted, IMAGES)
    assert outputs.dtype == original.dtype
    expected = np.asarray(tf.cast(original, tf.float32))
    assert signal_to_noise(expected, np.asarray(outputs, np.float32)) > LEAST
    # The user's model, and the model without a plan, are as before.
    assert {weight.dtype for weight in net.weights} <= {"float32", policy.removeprefix("mixed_")}
    np.testing.assert_array_equal(net(IMAGES), original)
    unchanged = np.asarray(adaptor.predict(model, IMAGES), np.float32)
    assert signal_to_noise(expected, unchanged) > LEAST + 15
    assert any("re-declared in float32" in warning for warning in model.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("source", [as_keras_file, as_saved_model, as_frozen_graph])
def test_a_mixed_policy_is_found_in_every_form_of_a_model(tmp_path, source):
    net = under("mixed_float16", functional)
    adaptor, model, converted, counts = all_int8(source(net, tmp_path))
    assert counts == {"int8": 4}
    assert signal_to_noise(np.asarray(net(IMAGES)), adaptor.predict(converted, IMAGES)) > LEAST
    folder = tmp_path / "saved"
    folder.mkdir()
    adaptor.save(model, folder)
    restored = adaptor.restore(folder)
    half = [node for node in restored.graph.nodes.values() if node.op == "Conv2D"]
    assert [tf.as_dtype(node.attr["T"].type) for node in half] == [tf.float16] * 2
    np.testing.assert_array_equal(adaptor.predict(restored, IMAGES), adaptor.predict(model, IMAGES))


def test_inputs_and_outputs_in_16_bits_keep_their_types():
    images = IMAGES.astype(np.float16)
    weight = np.random.default_rng(1).normal(size=(3, 3, 3, 4)).astype(np.float16)
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float16, (None, 16, 16, 3), name="x")
        y = tf.nn.conv2d(x, weight, 1, "SAME", name="y")
        tf.nn.relu(y, "z")
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph, outputs="y, z", example=images)
    space = adaptor.space(model, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    converted = adaptor.convert(model, plan, adaptor.observe(model, [images], space), space)
    assert plan.plan.counts() == {"int8": 1}
    for reference, output in zip(
        adaptor.predict(model, images), adaptor.predict(converted, images), strict=True
    ):
        assert reference.dtype == output.dtype == np.float16
        assert signal_to_noise(reference.astype(np.float32), output.astype(np.float32)) > LEAST


def test_a_graph_that_reads_the_bits_of_floats_stays_in_16_bits():
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, (None, 8), name="x")
        y = tf.matmul(tf.cast(x, tf.float16), np.eye(8, dtype=np.float16))
        tf.cast(tf.bitcast(y, tf.int16), tf.int32, name="y")
    adaptor, rows = TensorFlowAdaptor(), np.arange(16, dtype=np.float32).reshape(2, 8)
    model = adaptor.load(graph, example=rows)
    (warning,) = model.warnings
    assert "stay as they are and get no INT8: 'Bitcast' (Bitcast) reads the bits" in warning
    expected = rows.astype(np.float16).view(np.int16)
    np.testing.assert_array_equal(adaptor.predict(model, rows), expected)
