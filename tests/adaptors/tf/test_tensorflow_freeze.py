"""Models that hold more than weights: tables, seeds, functions of their own."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.errors import ModelLoadError

_RANDOM = np.random.default_rng(0)
_WORDS = [str(number) for number in _RANDOM.permutation(3000)]


def _table(keys: tf.Tensor, values: tf.Tensor, default: object) -> tf.lookup.StaticHashTable:
    return tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(keys, values), default)


@pytest.mark.parametrize(
    ("keys", "values", "default", "asked"),
    [
        (np.arange(300) * 7 - 900, np.arange(300), -5, _RANDOM.integers(-1000, 1300, (50, 7))),
        ([*_WORDS, ""], np.arange(3001), -1, np.array([["17", ""], ["4000", "x"]], object)),
        (np.arange(3, dtype="i4"), ["a", "b", "c"], "none", np.array([[2, 7]], "i4")),
        (["a"], [0.5], -3.0, np.array(["b", "a", ""], object)),
        (_WORDS, _WORDS, "none", np.array([*_WORDS[:50], "none of them"], object)),
    ],
    ids=["integers", "strings", "to strings", "one key", "strings to strings"],
)
def test_a_frozen_table_gives_what_the_table_gives(keys, values, default, asked):
    table = _table(tf.constant(keys), tf.constant(values), default)
    kind = tf.string if asked.dtype == object else tf.as_dtype(asked.dtype)

    @tf.function(input_signature=[tf.TensorSpec([None] * asked.ndim, kind)])
    def look_up(x):
        return {"found": table.lookup(x), "size": table.size()}

    adaptor = TensorFlowAdaptor()
    model = adaptor.load(look_up.get_concrete_function(), example=asked)
    given = adaptor.predict(model, asked)
    np.testing.assert_array_equal(given["found"], table.lookup(tf.constant(asked, kind)))
    assert given["size"] == len(values)
    assert not any("Table" in node.op for node in model.graph.nodes.values())


def test_an_empty_table_gives_the_default_only():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 4)
    look_up = tf.function(table.lookup, input_signature=[tf.TensorSpec([None], tf.string)])
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(look_up, example=np.array(["a"], object))
    assert adaptor.predict(model, np.array(["a", ""], object)).tolist() == [4, 4]


def _recurrent_net_on_words() -> tuple[keras.Model, np.ndarray]:
    words = keras.Input((4,), dtype="string")
    embedded = layers.Embedding(8, 8)(layers.StringLookup(vocabulary=["red", "green"])(words))
    states = layers.LSTM(8, dropout=0.5, recurrent_dropout=0.5)(embedded)
    net = keras.Model(words, layers.Dense(4)(states))
    return net, np.array([["red", "black", "red", "green"]] * 3, object)


def test_a_table_before_a_loop_and_seeds_of_dropout_are_frozen():
    net, words = _recurrent_net_on_words()
    adaptor = TensorFlowAdaptor()
    given = adaptor.predict(adaptor.load(net), words)
    np.testing.assert_allclose(given, net(words), rtol=1e-5, atol=1e-6)


def test_a_saved_model_with_a_table_and_seeds_of_dropout_is_frozen(tmp_path: Path):
    net, words = _recurrent_net_on_words()
    net.export(tmp_path / "net", verbose=False)
    adaptor = TensorFlowAdaptor()
    given = adaptor.predict(adaptor.load(tmp_path / "net"), words)
    np.testing.assert_allclose(given, net(words), rtol=1e-5, atol=1e-6)


def test_a_function_of_another_saved_model_is_frozen_with_its_weights(tmp_path: Path):
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="relu")])
    inner.export(tmp_path / "inner", verbose=False)
    inputs = keras.Input((8,))
    served = layers.TFSMLayer(tmp_path / "inner", call_endpoint="serve")(inputs)
    net = keras.Model(inputs, layers.Dense(4)(served))
    values = _RANDOM.normal(size=(3, 8)).astype("f4")
    adaptor = TensorFlowAdaptor()
    given = adaptor.predict(adaptor.load(net), values)
    np.testing.assert_allclose(given, net(values), rtol=1e-5, atol=1e-6)


class _Counter(tf.Module):
    """A product that counts its calls, and adds the count where told to."""

    def __init__(self, used: bool) -> None:
        super().__init__()
        self.count, self.used = tf.Variable(0.0), used

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def __call__(self, x):
        self.count.assign_add(1.0)
        return x * 2 + (self.count if self.used else 0.0)


def test_a_variable_that_no_output_needs_may_be_written():
    adaptor = TensorFlowAdaptor()
    counter = _Counter(used=False)
    model = adaptor.load(counter.__call__)
    assert adaptor.predict(model, np.ones((1, 4), "f4")).tolist() == [[2.0] * 4]


def test_a_variable_that_an_output_needs_may_not_be_written():
    counter = _Counter(used=True)
    with pytest.raises(ModelLoadError, match="must not keep state between calls"):
        TensorFlowAdaptor().load(counter.__call__)
