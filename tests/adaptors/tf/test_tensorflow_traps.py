"""Models that once came out wrong, crashed, or were refused without need; each stays right."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.core.precision import Precision
from neural_mp.space import limit_to_reached
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

BF16, FP16, INT8 = Precision.BF16, Precision.FP16, Precision.INT8


def values(*shape):
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def same(channels, kernel=3, **options):
    return layers.Conv2D(channels, kernel, padding="same", **options)


@pytest.fixture
def adaptor():
    return TensorFlowAdaptor()


@pytest.fixture
def converted(adaptor, all_machine):
    def convert(source, data, precision):
        loaded = isinstance(source, TensorFlowModel)
        model = source if loaded else adaptor.load(source, example=data)
        space = adaptor.space(model, all_machine)
        observations = adaptor.observe(model, [data], space)
        space = limit_to_reached(space, observations.ranges)
        return adaptor.convert(model, space.resolve(uniform(space, precision)), observations, space)

    return convert


def near(expected, actual, decibels=20.0):
    expected, actual = (tf.nest.flatten(result) for result in (expected, actual))
    assert len(expected) == len(actual)
    for reference, output in zip(expected, actual, strict=True):
        assert np.shape(reference) == np.shape(output)
        assert signal_to_noise(np.asarray(reference), np.asarray(output)) > decibels


def test_batches_of_two_inputs_may_broadcast(adaptor, converted):
    """The kernel of a residual sum would write the larger result over the smaller summand."""
    first, second = Input((8, 8, 3)), Input((8, 8, 3))
    net = Model([first, second], layers.Add()([layers.Conv2D(8, 3)(i) for i in (first, second)]))
    data = [values(1, 8, 8, 3), values(64, 8, 8, 3)]
    model = converted(net, data, INT8)
    near(net(data), adaptor.predict(model, data))
    near(net(data[::-1]), adaptor.predict(model, data[::-1]))


def test_rows_of_two_inputs_may_broadcast(adaptor, converted):
    first, second = Input((4, 8)), Input((4, 8))
    net = Model([first, second], layers.ReLU()(layers.Dense(8)(first) + layers.Dense(8)(second)))
    data = [values(5, 4, 8), values(1, 4, 8)]
    loaded = adaptor.load(net)
    near(net(data), adaptor.predict(loaded, data), 100)
    near(net(data), adaptor.predict(converted(loaded, data, INT8), data))


def limited():
    inputs = Input((None, 8))
    x = layers.Dense(6, activation="relu")(inputs[:, :50])
    return Model(inputs, layers.Dense(5)(x)), [(5, 20, 8), (1, 60, 8), (3, 50, 8), (2, 1, 8)]


def strided():
    inputs = Input((None, 4))
    x = layers.Conv1D(8, 3, strides=4, padding="same", activation="relu")(inputs)
    return Model(inputs, layers.Dense(3)(x)), [(26, 20, 4), (5, 20, 4), (1, 3, 4)]


def downsampled(tail):
    def build():
        x = inputs = Input((None, None, 3))
        for _ in range(3):
            x = same(8, strides=2, activation="relu")(x)
        return Model(inputs, tail(x)), [(2, 40, 56, 3), (1, 33, 90, 3)]

    return build


def attended(x):
    x = layers.Reshape((-1, 8))(x)
    return layers.MultiHeadAttention(2, 4)(x, x)


def padded(x):
    return layers.DepthwiseConv2D(3, strides=2)(layers.ZeroPadding2D()(x))


@pytest.mark.parametrize(
    "build",
    [
        limited,
        strided,
        downsampled(layers.Dense(4)),
        downsampled(attended),
        downsampled(padded),
        downsampled(lambda x: layers.Dense(3)(layers.UpSampling2D()(x))),
    ],
)
def test_sizes_that_depend_on_the_input_are_not_taken_as_fixed(build, adaptor, converted):
    net, shapes = build()
    model = adaptor.load(net, example=values(*shapes[0]))
    low = converted(model, values(*shapes[0]), INT8)
    for shape in shapes:
        data = values(*shape)
        near(net(data), adaptor.predict(model, data), 100)
        near(net(data), adaptor.predict(low, data), 15)


def test_an_empty_batch_ends_no_process(adaptor, converted):
    inputs = Input((8, 8, 8))
    x = layers.ReLU()(same(8)(inputs) + same(8)(inputs))
    pooled = layers.GlobalAveragePooling2D()(same(8, activation="relu")(x))
    model = converted(Model(inputs, [x, layers.Dense(3)(pooled)]), values(4, 8, 8, 8), INT8)
    empty = values(0, 8, 8, 8)
    for results in (adaptor.predict(model, empty), adaptor.native(model).predict(empty)):
        assert [len(part) for part in results] == [0, 0]


@pytest.mark.parametrize(
    "layer",
    [
        layers.LSTM(3),
        layers.GRU(3, return_sequences=True),
        layers.SimpleRNN(3),
        layers.Bidirectional(layers.LSTM(4)),
        layers.LSTM(3, unroll=True),
    ],
    ids=["lstm", "gru", "rnn", "bidirectional", "unrolled"],
)
def test_recurrent_layers_run_with_what_is_around_them(layer, adaptor, converted):
    inputs = Input((5, 4))
    net = Model(inputs, layers.Dense(6)(layer(layers.Dense(4)(inputs))))
    data = values(7, 5, 4)
    loaded = adaptor.load(net)
    assert not loaded.warnings
    near(net(data), adaptor.predict(loaded, data), 100)
    # test_tensorflow_bodies.py and the zoo have INT8.
    near(net(data), adaptor.predict(converted(loaded, data, BF16), data), 35)


@pytest.mark.parametrize("lowered", [None, False, True])
def test_loops_run_in_both_ways(lowered, adaptor):
    """By the adaptor, and as the module a user gets; from a function, and from frozen graphs."""

    @tf.function(input_signature=[tf.TensorSpec([None, 8], name="x")])
    def run(x):
        return tf.while_loop(lambda k, v: k < 3, lambda k, v: (k + 1, v * 2.0), [0, x])[1]

    source = run
    if lowered is not None:
        concrete = run.get_concrete_function()
        frozen = convert_variables_to_constants_v2(concrete, lower_control_flow=lowered)
        source = frozen.graph.as_graph_def()
    model, data = adaptor.load(source), values(2, 8)
    assert len(model.signature.outputs) == 1
    np.testing.assert_array_equal(adaptor.predict(model, data), data * 8)
    np.testing.assert_array_equal(adaptor.native(model)(data), data * 8)


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("precision", [INT8, BF16, FP16])
def test_branches_run_in_either_direction(sign, precision, adaptor, converted):
    weight = values(8, 3)

    @tf.function(input_signature=[tf.TensorSpec([None, 8], name="x")])
    def run(x):
        branch = tf.cond(
            tf.reduce_sum(x) > 0, lambda: tf.nn.relu(x @ tf.ones([8, 8])), lambda: x * 2.0
        )
        return branch @ weight

    data = values(4, 8) + sign
    near(run(data), adaptor.predict(converted(run, data, precision), data), 30)


@pytest.mark.parametrize("sign", [1, -1])
def test_branches_that_hold_constants_of_their_own(sign, adaptor, converted):
    first, second = values(8, 8), tf.constant(values(8, 8))

    @tf.function(input_signature=[tf.TensorSpec([4, 8], name="x")])
    def run(x):
        return tf.cond(tf.reduce_sum(x) > 0, lambda: x @ first, lambda: tf.exp(x @ second)) @ first

    data = values(4, 8) + sign
    near(run(data), adaptor.predict(converted(run, data, BF16), data), 30)


def test_results_of_several_types(adaptor):
    data = values(5, 8)
    picked = tf.function(lambda z: tf.gather(z, tf.argsort(z[:, 0])))
    near(picked(data), adaptor.predict(adaptor.load(picked, example=data), data), 100)
    largest = tf.function(lambda y: tf.math.top_k(y, 2))
    numbers, indices = adaptor.predict(adaptor.load(largest, example=data), data)
    expected = tf.math.top_k(data, 2)
    np.testing.assert_array_equal(numbers, expected[0])
    np.testing.assert_array_equal(indices, expected[1])
    assert indices.dtype == np.int32


def test_a_clipped_tensor_that_shares_the_scale_of_a_signed_one(adaptor, converted):
    inputs = Input((8, 8, 3))
    clipped, signed = same(8, activation="relu")(inputs), same(8)(inputs)
    joined = layers.Concatenate()([clipped, signed])
    net = Model(inputs, [same(4)(joined), same(4)(clipped)])
    data = values(2, 8, 8, 3)
    near(net(data), adaptor.predict(converted(net, data, INT8), data), 30)


@pytest.mark.parametrize("precision", [INT8, BF16, FP16])
def test_an_equation_with_an_ellipsis(precision, adaptor, converted):
    """TensorFlow's own FP16 kernel gives wrong numbers for it."""
    weight = values(4, 6)
    run = tf.function(
        lambda x: tf.einsum("...c,cd->...d", x, weight),
        input_signature=[tf.TensorSpec([None, 5, 4], name="x")],
    )
    data = values(2, 5, 4)
    near(run(data), adaptor.predict(converted(run, data, precision), data), 30)


def test_a_model_that_does_nothing(adaptor, all_machine):
    inputs = Input((8,))
    model = adaptor.load(Model(inputs, inputs))
    data = values(2, 8)
    np.testing.assert_array_equal(adaptor.predict(model, data), data)
    assert adaptor.observe(model, [data], adaptor.space(model, all_machine)).samples == 2


def test_nested_inputs_and_outputs(adaptor):
    class Nested(keras.Model):
        def call(self, x):
            return {"o": x * 2, "l": [x, (x + 1, None)]}

    data = values(2, 8)
    model = adaptor.load(Nested(), example=data)
    assert [port.name for port in model.signature.outputs] == ["l_0", "l_1_0", "o"]
    outputs = adaptor.predict(model, data)
    np.testing.assert_array_equal(outputs["o"], data * 2)
    np.testing.assert_array_equal(outputs["l"][1][0], data + 1)
    assert outputs["l"][1][1] is None
    first, second = Input((8,), name="one"), Input((4,), name="other")
    net = Model([first, {"k": second}], layers.Dense(6)(first) + layers.Dense(6)(second))
    batch = [values(3, 8), {"k": values(3, 4)}]
    near(net(batch), adaptor.predict(adaptor.load(net), batch), 100)


def test_a_function_of_a_dict(adaptor):
    run = tf.function(lambda features: features["a"] * 2)
    data = {"a": values(2, 3)}
    np.testing.assert_array_equal(
        adaptor.predict(adaptor.load(run, example=data), data), data["a"] * 2
    )


def test_the_users_graph_may_change_afterwards(adaptor):
    net = keras.Sequential([Input((100,)), layers.Dense(120), layers.Dense(3)])
    graph = adaptor.load(net).graph.to_graph_def()
    model, data = adaptor.load(graph), values(3, 100)
    for node in graph.node:
        tensor = node.attr["value"].tensor
        if len(tensor.tensor_content) > 20000:
            tensor.tensor_content = bytes(len(tensor.tensor_content))
    near(net(data), adaptor.predict(model, data), 100)


def test_the_native_model_runs_within_a_function(adaptor, converted):
    inputs = Input((8,))
    net, data = Model(inputs, layers.Dense(3)(inputs)), values(4, 8)
    native = adaptor.native(converted(net, data, INT8))
    near(net(data), tf.function(lambda x: native(x) + 0.0)(data), 30)


def test_tiny_numbers_are_numbers(adaptor, converted):
    inputs = Input((8, 8, 8))
    net = Model(inputs, layers.Conv2D(4, 3)(layers.Conv2D(8, 3, activation="relu")(inputs)))
    data = values(4, 8, 8, 8) * np.float32(1e-12)
    near(net(data), adaptor.predict(converted(net, data, INT8), data))
