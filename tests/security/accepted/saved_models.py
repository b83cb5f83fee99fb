"""SavedModels of TensorFlow 2, TensorFlow 1 and Keras, as they are served."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from accepted import saved_models_v1
from accepted.cases import WORDS, Case, Cases, Result, example, outcomes
from accepted.keras_nets import MODELS
from keras import layers

CASES = Cases()
_FLOATS = tf.TensorSpec([None, 4], tf.float32, name="x")
_TEXT = tf.TensorSpec([None], tf.string, name="text")


def _exported(name: str) -> None:
    def make(path: Path) -> None:
        keras.utils.set_random_seed(0)
        MODELS[name]().export(path, verbose=False)

    CASES.add(f"keras_{name}", make, random=name in ("random_at_inference", "augmented"))


for _name in (
    "TextVectorization",
    "TextVectorization_adapted",
    "TextVectorization_tf_idf",
    "features",
    "StringLookup_adapted",
    "StringLookup_multi_hot",
    "IntegerLookup",
    "Hashing",
    "masked",
    "transformer",
    "several",
    "operations",
    "random_at_inference",
    "policy_mixed_float16",
    "quantized_int8",
    "open_sizes",
    "augmented",
    "sequential",
):
    _exported(_name)


@CASES.case()
def keras_cnn(path: Path) -> None:
    """A convolutional net, saved by TensorFlow."""
    net = keras.Sequential(
        [
            keras.Input((8, 8, 3)),
            layers.Conv2D(4, 3),
            layers.BatchNormalization(),
            layers.ReLU(),
            layers.GlobalAveragePooling2D(),
            layers.Dense(2),
        ]
    )
    tf.saved_model.save(net, str(path))


def _served(
    name: str, spec: Any, *, variables: bool = False, random: bool = False, **options: Any
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds a SavedModel whose signature is the decorated function."""

    def added(run: Callable[..., Any]) -> Callable[..., Any]:
        def make(path: Path) -> None:
            tf.random.set_seed(0)
            module = tf.Module()
            module.path = str(path.parent / f"{name}.txt")
            if variables:
                module.weight = tf.Variable(tf.random.normal([4, 3]))
                module.table = tf.Variable(tf.random.normal([10, 4]))
            specs = list(spec) if isinstance(spec, tuple) else [spec]
            function = run(module)
            module.call = tf.function(function, input_signature=specs, **options)
            tf.saved_model.save(module, str(path), signatures=module.call)

        CASES.add(name, make, random=random)
        return run

    return added


@_served("module", _FLOATS, variables=True)
def _module(m: Any) -> Any:
    return lambda x: {"y": tf.nn.relu(x @ m.weight)}


@_served("jit_compiled", _FLOATS, variables=True, jit_compile=True)
def _jit_compiled(m: Any) -> Any:
    return lambda x: {"y": tf.nn.softmax(x @ m.weight)}


@_served("jit_compiled_inside", _FLOATS, variables=True)
def _jit_compiled_inside(m: Any) -> Any:
    m.inner = tf.function(lambda x: tf.nn.gelu(x @ m.weight), jit_compile=True)
    return lambda x: {"y": m.inner(x) + m.inner(2.0 * x)}


@_served("jit_compiled_loop", _FLOATS, variables=True, jit_compile=True)
def _jit_compiled_loop(m: Any) -> Any:
    def run(x: Any) -> Any:
        for _ in tf.range(3):
            x = tf.tanh(x @ m.weight @ tf.transpose(m.weight))
        return {"y": x}

    return run


@_served("generator", _FLOATS, random=True)
def _generator(m: Any) -> Any:
    m.source = tf.random.Generator.from_seed(1)
    return lambda x: {"y": x + m.source.normal([4]) + m.source.uniform([4])}


@_served("random_ops", _FLOATS, random=True)
def _random_ops(m: Any) -> Any:
    return lambda x: {"y": x + tf.random.normal(tf.shape(x)), "z": tf.nn.dropout(x, 0.5)}


@_served("control_flow", _FLOATS, variables=True)
def _control_flow(m: Any) -> Any:
    def run(x: Any) -> Any:
        sums = tf.TensorArray(tf.float32, 3)
        for i in tf.range(3):
            sums = sums.write(i, tf.reduce_sum(x) * tf.cast(i, tf.float32))
        if tf.reduce_sum(x) > 0:
            x = x @ m.weight
        else:
            x = (x - 1) @ m.weight
        tf.debugging.assert_all_finite(x, "finite")
        return {"y": x, "sums": sums.stack()}

    return run


@_served("switch_case", tf.TensorSpec([], tf.int32, name="n"), variables=True)
def _switch_case(m: Any) -> Any:
    branches = [lambda: m.weight * 1.0, lambda: m.weight * 2.0, lambda: tf.zeros([4, 3])]
    return lambda n: {"y": tf.switch_case(n, branches)}


@_served("two_inputs", (_FLOATS, tf.TensorSpec([None, 4], tf.float32, name="z")), variables=True)
def _two_inputs(m: Any) -> Any:
    return lambda x, z: {"sum": (x + z) @ m.weight, "product": x * z}


def _lines(m: Any) -> Any:
    """Return an initializer of a table from a text file, which becomes an asset."""
    Path(m.path).write_text("\n".join(WORDS))
    kind = tf.lookup.TextFileIndex
    return tf.lookup.TextFileInitializer(
        m.path, tf.string, kind.WHOLE_LINE, tf.int64, kind.LINE_NUMBER
    )


@_served("text_asset", _TEXT, variables=True)
def _text_asset(m: Any) -> Any:
    m.words = tf.lookup.StaticHashTable(_lines(m), 9)

    def run(text: Any) -> Any:
        tokens = tf.strings.split(tf.strings.lower(text)).to_tensor("")
        return {"y": tf.reduce_mean(tf.gather(m.table, m.words.lookup(tokens)), 1) @ m.weight}

    return run


@_served("vocabulary_asset", _TEXT, variables=True)
def _vocabulary_asset(m: Any) -> Any:
    m.words = tf.lookup.StaticVocabularyTable(_lines(m), 3)
    return lambda text: {"y": tf.gather(m.table, m.words.lookup(text)), "n": m.words.size()}


def _pairs(keys: Any, values: Any) -> Any:
    return tf.lookup.KeyValueTensorInitializer(tf.constant(keys), tf.constant(values, tf.int64))


@_served("tables", _TEXT, variables=True)
def _tables(m: Any) -> Any:
    m.first = tf.lookup.StaticHashTable(_pairs(WORDS, [1, 2, 3, 4]), 0)
    m.second = tf.lookup.StaticVocabularyTable(_pairs(WORDS[:2], [0, 1]), 2)
    return lambda text: {"y": tf.gather(m.table, m.first.lookup(text) + m.second.lookup(text))}


@_served("table_of_integers", tf.TensorSpec([None], tf.int64, name="id"), variables=True)
def _table_of_integers(m: Any) -> Any:
    m.known = tf.lookup.StaticHashTable(_pairs(np.array([1, 3], np.int64), [7, 8]), 0)
    return lambda id: {"y": tf.gather(m.table, m.known.lookup(id))}


@_served("table_that_changes", _TEXT)
def _table_that_changes(m: Any) -> Any:
    m.words = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    m.words.insert(tf.constant(WORDS), tf.range(4, dtype=tf.int64))
    return lambda text: {"y": tf.cast(m.words.lookup(text), tf.float32)}


@_served("table_of_vectors", _TEXT)
def _table_of_vectors(m: Any) -> Any:
    m.words = tf.lookup.experimental.MutableHashTable(tf.string, tf.float32, [0.0, 0.0])
    m.words.insert(tf.constant(WORDS), tf.random.normal([4, 2]))
    return lambda text: {"y": m.words.lookup(text)}


@_served("table_that_is_dense", tf.TensorSpec([None], tf.int64, name="id"))
def _table_that_is_dense(m: Any) -> Any:
    m.known = tf.lookup.experimental.DenseHashTable(tf.int64, tf.float32, -1.0, -1, -2)
    m.known.insert(tf.constant([1, 3], tf.int64), [0.5, 0.25])
    return lambda id: {"y": m.known.lookup(id)}


@_served("table_in_a_loop", _TEXT, variables=True)
def _table_in_a_loop(m: Any) -> Any:
    m.words = tf.lookup.StaticHashTable(_pairs(WORDS, [1, 2, 3, 4]), 0)

    def one(text: Any) -> Any:
        return tf.reduce_sum(tf.gather(m.table, m.words.lookup(tf.strings.split(text))), 0)

    return lambda text: {"y": tf.map_fn(one, text, fn_output_signature=tf.float32) @ m.weight}


@_served("strings", _TEXT)
def _strings(m: Any) -> Any:
    def run(text: Any) -> Any:
        cleaned = tf.strings.regex_replace(text, "[^a-z ]", "")
        letters = tf.strings.bytes_split(cleaned).to_tensor("")
        codes = tf.strings.unicode_decode(cleaned, "UTF-8").to_tensor()
        hashed = tf.strings.to_hash_bucket_fast(letters, 100)
        return {"hashed": hashed, "length": tf.strings.length(cleaned), "codes": codes}

    return run


@_served("ngrams", _TEXT)
def _ngrams(m: Any) -> Any:
    def run(text: Any) -> Any:
        pairs = tf.strings.ngrams(tf.strings.bytes_split(text), 2)
        return {"y": pairs.to_tensor(""), "joined": tf.strings.join([text, text], "-")}

    return run


def _ragged(path: Path) -> dict[str, Any]:
    """Write a model of ragged rows, whose parts are separate inputs of its signature."""
    module = tf.Module()
    spec = tf.RaggedTensorSpec([None, None], tf.float32)
    module.call = tf.function(lambda x: {"y": tf.reduce_sum(x, 1)}, input_signature=[spec])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return {"x": np.array([1, 2, 3], np.float32), "x_1": np.array([0, 2, 3])}


CASES.add("ragged", _ragged)


@_served("data_inside", _FLOATS)
def _data_inside(m: Any) -> Any:
    def run(x: Any) -> Any:
        total = tf.zeros([4])
        for row in tf.data.Dataset.from_tensor_slices(x).map(lambda row: row * 2):
            total += row
        return {"y": total}

    return run


@_served("gathered", tf.TensorSpec([None, 2], tf.int32, name="ids"), variables=True)
def _gathered(m: Any) -> Any:
    return lambda ids: {"y": tf.nn.embedding_lookup(m.table, ids) @ m.weight}


@_served("split", _FLOATS, variables=True)
def _split(m: Any) -> Any:
    def run(x: Any) -> Any:
        first, second = tf.split(x @ m.weight, [1, 2], axis=1)
        return {"y": first * tf.gather(second, [[0], [1], [1]], axis=1, batch_dims=1)}

    return run


@_served("counted", _FLOATS, variables=True)
def _counted(m: Any) -> Any:
    m.calls = tf.Variable(0, trainable=False)

    def run(x: Any) -> Any:
        m.calls.assign_add(1)
        return {"y": x @ m.weight}

    return run


def _pictures(path: Path) -> dict[str, Any]:
    def run(jpeg: Any) -> Any:
        image = tf.image.convert_image_dtype(tf.io.decode_jpeg(jpeg, channels=3), tf.float32)
        return {"y": tf.image.resize(image[None], [8, 8])}

    module = tf.Module()
    module.call = tf.function(run, input_signature=[tf.TensorSpec([], tf.string, name="jpeg")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    picture = tf.io.encode_jpeg(tf.zeros([9, 9, 3], tf.uint8) + 100)
    return {"jpeg": np.asarray(picture.numpy(), object)}


CASES.add("pictures", _pictures)


def _examples(path: Path) -> dict[str, Any]:
    def run(examples: Any) -> Any:
        features = tf.io.parse_example(examples, {"x": tf.io.FixedLenFeature([4], tf.float32)})
        return {"y": features["x"] * 2}

    module = tf.Module()
    spec = tf.TensorSpec([None], tf.string, name="examples")
    module.call = tf.function(run, input_signature=[spec])
    tf.saved_model.save(module, str(path), signatures=module.call)
    values = tf.train.Feature(float_list=tf.train.FloatList(value=[1.0, 2, 3, 4]))
    packed = tf.train.Example(features=tf.train.Features(feature={"x": values}))
    return {"examples": np.array([packed.SerializeToString()] * 2, object)}


CASES.add("examples", _examples)


def _reading(path: Path) -> dict[str, Any]:
    """Write a model that reads files, which is refused unless the op is trusted."""
    picture = path.parent / "picture.png"
    tf.io.write_file(str(picture), tf.io.encode_png(tf.zeros([4, 4, 3], tf.uint8)))

    def run(path: Any) -> Any:
        return {"y": tf.image.decode_png(tf.io.read_file(path), channels=3)}

    module = tf.Module()
    module.call = tf.function(run, input_signature=[tf.TensorSpec([], tf.string, name="path")])
    tf.saved_model.save(module, str(path), signatures=module.call)
    return {"path": np.asarray(str(picture), object)}


CASES.add("file_reading", _reading)
saved_models_v1.add(CASES)


def _expected(path: Path, feeds: Mapping[str, Any] | None) -> tuple[Any, list[Any]]:
    loaded = tf.saved_model.load(str(path))
    run = loaded.signatures["serving_default"]
    _, specs = run.structured_input_signature
    if feeds is None:
        feeds = {name: _fed(spec, seed) for seed, (name, spec) in enumerate(sorted(specs.items()))}
    outputs = run(**{name: tf.constant(value) for name, value in feeds.items()})
    return feeds, [np.asarray(outputs[name]) for name in sorted(outputs)]


def _fed(spec: Any, seed: int) -> Any:
    kind = "string" if spec.dtype is tf.string else spec.dtype.name
    return example(kind, spec.shape, seed)


def _given(path: Path, feeds: Any) -> list[Any]:
    from neural_mp.adaptors.registry import adaptor_for

    adaptor = adaptor_for(str(path))
    outputs = adaptor.predict(adaptor.load(str(path)), feeds)
    if isinstance(outputs, Mapping):
        return [outputs[name] for name in sorted(outputs)]
    return [outputs]


def results(cases: Iterable[Case], folder: Path) -> Iterator[Result]:
    """Yield the outcome of every case."""
    return outcomes(cases, folder, _expected, _given)
