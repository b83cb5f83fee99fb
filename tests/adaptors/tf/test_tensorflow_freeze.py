"""Models that hold more than weights: tables, seeds, functions of their own."""

from __future__ import annotations

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from tensorflow.compiler.tf2xla.ops import gen_xla_ops

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
    outputs = adaptor.predict(model, asked)
    np.testing.assert_array_equal(outputs["found"], table.lookup(tf.constant(asked, kind)))
    assert outputs["size"] == len(values)
    assert not any("Table" in node.op for node in model.graph.nodes.values())


def test_an_empty_table_gives_the_default_only():
    table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, 4)
    look_up = tf.function(table.lookup, input_signature=[tf.TensorSpec([None], tf.string)])
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(look_up, example=np.array(["a"], object))
    assert adaptor.predict(model, np.array(["a", ""], object)).tolist() == [4, 4]


def _recurrent_net_on_words() -> tuple[keras.Model, np.ndarray]:
    inputs = keras.Input((4,), dtype="string")
    embedded = layers.Embedding(8, 8)(layers.StringLookup(vocabulary=["red", "green"])(inputs))
    states = layers.LSTM(8, dropout=0.5, recurrent_dropout=0.5)(embedded)
    net = keras.Model(inputs, layers.Dense(4)(states))
    return net, np.array([["red", "black", "red", "green"]] * 3, object)


@pytest.mark.slow
def test_a_table_before_a_loop_and_seeds_of_dropout_are_frozen():
    net, texts = _recurrent_net_on_words()
    adaptor = TensorFlowAdaptor()
    outputs = adaptor.predict(adaptor.load(net), texts)
    np.testing.assert_allclose(outputs, net(texts), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_a_saved_model_with_a_table_and_seeds_of_dropout_is_frozen(tmp_path: Path):
    net, texts = _recurrent_net_on_words()
    net.export(tmp_path / "net", verbose=False)
    adaptor = TensorFlowAdaptor()
    outputs = adaptor.predict(adaptor.load(tmp_path / "net"), texts)
    np.testing.assert_allclose(outputs, net(texts), rtol=1e-5, atol=1e-6)


def test_a_function_of_another_saved_model_is_frozen_with_its_weights(tmp_path: Path):
    inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="relu")])
    inner.export(tmp_path / "inner", verbose=False)
    inputs = keras.Input((8,))
    served = layers.TFSMLayer(tmp_path / "inner", call_endpoint="serve")(inputs)
    net = keras.Model(inputs, layers.Dense(4)(served))
    values = _RANDOM.normal(size=(3, 8)).astype("f4")
    adaptor = TensorFlowAdaptor()
    outputs = adaptor.predict(adaptor.load(net), values)
    np.testing.assert_allclose(outputs, net(values), rtol=1e-5, atol=1e-6)


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


@pytest.mark.slow
@pytest.mark.parametrize("loop", [False, True], ids=["plain", "with a loop"])
@pytest.mark.parametrize("outer", [False, True], ids=["called", "itself"])
def test_variables_of_compiled_functions_are_frozen(tmp_path: Path, loop, outer):
    module = tf.Module()
    module.weight = tf.Variable(_RANDOM.normal(size=(4, 4)).astype("f4"))

    def step(x):
        if not loop:
            return tf.nn.gelu(x @ module.weight)
        for _ in tf.range(3):
            x = tf.tanh(x @ module.weight)
        return x

    specs = [tf.TensorSpec([None, 4], name="x")]
    compiled = tf.function(step, jit_compile=True)
    module.run = tf.function(
        lambda x: {"y": step(x) if outer else compiled(x) + compiled(2.0 * x)},
        input_signature=specs,
        jit_compile=outer or None,
    )
    tf.saved_model.save(module, str(tmp_path), signatures=module.run)
    values = _RANDOM.normal(size=(3, 4)).astype("f4")
    adaptor = TensorFlowAdaptor()
    outputs = adaptor.predict(adaptor.load(tmp_path), values)
    np.testing.assert_allclose(outputs, module.run(values)["y"], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_ops_of_xla_that_also_run_alone_are_taken():
    @tf.function(jit_compile=True, input_signature=[tf.TensorSpec([2, 2])])
    def run(x):
        return gen_xla_ops.xla_svd(x, max_iter=9, epsilon=0.1, precision_config="")[0]

    values, adaptor = _RANDOM.random((2, 2)).astype("f4"), TensorFlowAdaptor()
    np.testing.assert_allclose(adaptor.predict(adaptor.load(run), values), run(values), rtol=1e-5)


def test_an_op_that_only_xla_runs_is_named():
    def products(x):
        return tf.raw_ops.SegmentProdV2(data=x, segment_ids=[0, 1], num_segments=2)

    inner = tf.function(products, jit_compile=True)
    run = tf.function(lambda x: inner(x) + 1.0, input_signature=[tf.TensorSpec([2, 2])])
    assert run(np.ones((2, 2), "f4")).shape == (2, 2)
    with pytest.raises(ModelLoadError, match=r"must run without XLA.*'SegmentProdV2'"):
        TensorFlowAdaptor().load(run)


def _tables_in_a_loop() -> tuple[tf.Module, np.ndarray]:
    module = tf.Module()
    module.words = _table(tf.constant(["red", "green"]), tf.constant([1, 2]), 0)
    module.vectors = tf.Variable(_RANDOM.normal(size=(3, 4)).astype("f4"))

    def one(text):
        indices = module.words.lookup(tf.strings.split(text))
        return tf.reduce_sum(tf.gather(module.vectors, indices), 0)

    module.run = tf.function(
        lambda texts: {"y": tf.map_fn(one, texts, fn_output_signature=tf.float32)},
        input_signature=[tf.TensorSpec([None], tf.string, name="texts")],
    )
    return module, np.array(["red red green", "blue", ""], object)


def _vectors() -> tuple[tf.Module, np.ndarray]:
    module = tf.Module()
    module.words = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, [0.0, 1.0])
    module.words.insert(tf.constant(["red", "green"]), [[1.0, 2.0], [3.0, 4.0]])
    specs = [tf.TensorSpec([None, None], tf.string, name="texts")]
    module.run = tf.function(lambda t: {"y": module.words.lookup(t)}, input_signature=specs)
    return module, np.array([["red", "blue"], ["green", "red"]], object)


def _dense() -> tuple[tf.Module, np.ndarray]:
    module = tf.Module()
    module.numbers = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, -1.0, -1, -2)
    module.numbers.insert(tf.constant([1, 3], tf.int64), [0.5, 0.25])
    specs = [tf.TensorSpec([None], tf.int64, name="numbers")]
    module.run = tf.function(
        lambda n: {"y": module.numbers.lookup(n), "size": module.numbers.size()},
        input_signature=specs,
    )
    return module, np.array([3, 7, 1])


@pytest.mark.slow
@pytest.mark.parametrize("build", [_tables_in_a_loop, _vectors, _dense])
def test_tables_of_other_kinds_and_places_are_frozen(tmp_path: Path, build):
    module, inputs = build()
    tf.saved_model.save(module, str(tmp_path), signatures=module.run)
    adaptor = TensorFlowAdaptor()
    outputs = adaptor.predict(adaptor.load(tmp_path), inputs)
    outputs = outputs if isinstance(outputs, dict) else {"y": outputs}
    for name, expected in module.run(tf.constant(inputs)).items():
        np.testing.assert_allclose(outputs[name], expected, rtol=1e-6)


def test_a_table_that_was_never_filled_is_named(tmp_path: Path):
    """An .h5 file does not keep an adapted vocabulary: Keras itself cannot run the model."""
    lookup, inputs = layers.StringLookup(), keras.Input((2,), dtype="string")
    lookup.adapt(tf.constant(["red", "green"]))
    net = keras.Model(inputs, layers.Embedding(4, 3)(lookup(inputs)))
    net.save(tmp_path / "net.h5")
    net.save(tmp_path / "net.keras")
    texts, adaptor = np.array([["red", "blue"]], object), TensorFlowAdaptor()
    with pytest.raises(tf.errors.FailedPreconditionError):
        keras.models.load_model(tmp_path / "net.h5")(tf.constant(texts))
    with pytest.raises(ModelLoadError, match=r"was never filled.*save the model as \.keras"):
        adaptor.load(tmp_path / "net.h5")
    outputs = adaptor.predict(adaptor.load(tmp_path / "net.keras"), texts)
    np.testing.assert_allclose(outputs, net(tf.constant(texts)), rtol=1e-6)


def _with_generator() -> tuple[tf.Module, float]:
    module = tf.Module()
    module.source = tf.random.Generator.from_seed(1)
    module.run = tf.function(
        lambda x: {"y": 3.0 * module.source.normal(tf.shape(x)) + x},
        input_signature=[tf.TensorSpec([None, 4], name="x")],
    )
    return module, 3.0


def _with_dropout() -> tuple[keras.Model, float]:
    inputs = keras.Input((4,), name="x")
    return keras.Model(inputs, layers.Dropout(0.5)(inputs, training=True)), 1.0


@pytest.mark.parametrize("build", [_with_generator, _with_dropout])
def test_a_random_model_stays_random_with_its_distribution(tmp_path: Path, build):
    model, deviation = build()
    if isinstance(model, keras.Model):
        model.export(tmp_path, verbose=False)
    else:
        tf.saved_model.save(model, str(tmp_path), signatures=model.run)
    adaptor = TensorFlowAdaptor()
    loaded, ones = adaptor.load(tmp_path), np.ones((4000, 4), "f4")
    first, second = (np.asarray(adaptor.predict(loaded, ones)) for _ in range(2))
    assert not np.array_equal(first, second)
    for sample in (first, second):
        assert sample.mean() == pytest.approx(1.0, abs=0.15)
        assert sample.std() == pytest.approx(deviation, rel=0.05)


def test_an_integer_that_is_more_than_a_seed_is_still_state():
    module = tf.Module()
    module.seed = tf.Variable([1, 2], dtype=tf.int32)

    @tf.function(input_signature=[tf.TensorSpec([None, 4])])
    def run(x):
        noise = tf.random.stateless_normal(tf.shape(x), module.seed)
        module.seed.assign_add([1, 1])
        return noise + tf.cast(module.seed[0], tf.float32)

    with pytest.raises(ModelLoadError, match="must not keep state between calls"):
        TensorFlowAdaptor().load(run)
