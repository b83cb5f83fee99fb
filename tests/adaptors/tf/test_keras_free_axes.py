"""Lengths that are free: by shapes that are given, and by batches that differ."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from neural_mp import MixedPrecision
from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.errors import CaptureError, ConfigurationError
from neural_mp.testing import signal_to_noise


class _Encoder(keras.Model):
    """A model for tokens of any length."""

    def __init__(self):
        super().__init__()
        self.embedding = layers.Embedding(64, 16)
        self.convolution = layers.Conv1D(16, 3, padding="same", activation="relu")
        self.attention = layers.MultiHeadAttention(2, 8)
        self.head = layers.Dense(4)

    def call(self, tokens):
        states = self.convolution(self.embedding(tokens))
        states = states + self.attention(states, states)
        return self.head(tf.reduce_mean(states, 1))


class _OfOneLength(keras.Model):
    """A model with a weight for each place in a sequence."""

    def __init__(self):
        super().__init__()
        self.head = layers.Dense(4)

    def call(self, values):
        return self.head(layers.Flatten()(values))


def _tokens(*lengths):
    random = np.random.default_rng(0)
    return [random.integers(1, 60, (4, length)).astype("i4") for length in lengths]


def _converter(model, batches, tmp_path, **options):
    return MixedPrecision(
        model=model,
        calib_dataloader=batches,
        precisions="int8",
        objective="modelsize",
        workspace=tmp_path,
        cache=False,
        **options,
    )


@pytest.fixture
def encoder():
    keras.utils.set_random_seed(0)
    return _Encoder()


@pytest.mark.slow
@pytest.mark.parametrize("called", [False, True], ids=["never built", "called first"])
def test_batches_of_several_lengths_free_the_length(encoder, called, tmp_path):
    batches = _tokens(8, 8, 5, 13)
    if called:
        encoder(batches[0])
    result = _converter(encoder, batches, tmp_path)()
    assert result.plan.counts()["int8"]
    for batch in (*batches, *_tokens(21)):
        assert signal_to_noise(np.asarray(encoder(batch)), np.asarray(result(batch))) > 20


@pytest.mark.parametrize(
    "shapes",
    [
        (None, None),
        [(None, None)],
        tf.TensorSpec((None, None), tf.int32),
        keras.Input((None,), dtype="int32"),
    ],
    ids=["a shape", "a list", "a TensorSpec", "an Input"],
)
def test_shapes_given_as_inputs_free_the_length(encoder, shapes):
    adaptor = TensorFlowAdaptor()
    first, second = _tokens(8, 13)
    model = adaptor.load(encoder, inputs=shapes, example=first)
    np.testing.assert_allclose(
        adaptor.predict(model, second), encoder(second), rtol=1e-4, atol=1e-5
    )


@pytest.mark.slow
def test_a_run_takes_shapes_where_all_batches_are_alike(encoder, tmp_path):
    result = _converter(encoder, _tokens(8, 8), tmp_path, inputs=[(None, None)])()
    assert np.asarray(result(_tokens(13)[0])).shape == (4, 4)


def test_shapes_by_name_free_the_axes_of_one_input():
    class Two(keras.Model):
        def call(self, inputs):
            return tf.reduce_mean(inputs["a"], 1) + tf.reduce_mean(inputs["b"], 1)

    adaptor, net = TensorFlowAdaptor(), Two()
    example = {"a": np.ones((2, 3, 4), "f4"), "b": np.ones((2, 5, 4), "f4")}
    model = adaptor.load(net, inputs={"a": (None, None, 4)}, example=example)
    longer = {**example, "a": np.ones((2, 9, 4), "f4")}
    np.testing.assert_allclose(adaptor.predict(model, longer), net(longer))
    with pytest.raises(ConfigurationError, match="'c', which is not an input"):
        adaptor.load(net, inputs={"c": (None, None, 4)}, example=example)


def test_shapes_free_the_length_of_a_function():
    adaptor = TensorFlowAdaptor()
    mean = tf.function(lambda values: tf.reduce_mean(tf.nn.relu(values), 1))
    first, second = np.ones((2, 3, 4), "f4"), np.ones((2, 7, 4), "f4")
    model = adaptor.load(mean, inputs=(None, None, 4), example=first)
    np.testing.assert_allclose(adaptor.predict(model, second), mean(second))


def test_a_model_that_needs_the_length_is_refused_with_the_reason(tmp_path):
    batches = [np.ones((4, length, 8), "f4") for length in (6, 9)]
    with pytest.raises(CaptureError, match=r"differ in size.*shapes \[\(None, None, 8\)\].*pad"):
        _converter(_OfOneLength(), batches, tmp_path)()


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        ((None, 9), "must fit"),
        ([(None, None)] * 2, "for each of 1 inputs, got 2"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(encoder, shapes, said):
    with pytest.raises(ConfigurationError, match=said):
        TensorFlowAdaptor().load(encoder, inputs=shapes, example=_tokens(8)[0])


def test_shapes_are_refused_where_they_free_nothing(encoder, tmp_path):
    graph = tf.function(lambda x: x * 2).get_concrete_function(tf.TensorSpec([None, 4])).graph
    with pytest.raises(ConfigurationError, match="shapes apply to Keras models"):
        TensorFlowAdaptor().load(graph, inputs=(None, None))
