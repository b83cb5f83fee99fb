"""SavedModels as TensorFlow 1 writes them: graphs with variables, tables and assets."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
from accepted.cases import WORDS, Cases

_V1 = tf.compat.v1
_WEIGHT = np.random.default_rng(0).normal(size=(4, 2)).astype(np.float32)
#: Adds a graph to the default graph; returns the inputs and outputs of its signature.
_Build = Callable[[Path], tuple[dict[str, Any], dict[str, Any]]]


def add(cases: Cases) -> None:
    """Add the cases of TensorFlow 1."""
    for build in (_references, _resources, _conv, _asset, _asset_of_buckets, _pairs, _bucket):
        cases.add(f"v1{build.__name__}", _maker(build))


def _maker(build: _Build) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        with tf.Graph().as_default() as graph, _V1.Session(graph=graph) as session:
            inputs, outputs = build(path)
            tables = _V1.tables_initializer()
            session.run([_V1.global_variables_initializer(), tables])
            _V1.saved_model.simple_save(session, str(path), inputs, outputs, legacy_init_op=tables)

    return make


def _references(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    x = _V1.placeholder(tf.float32, [None, 4], name="x")
    weight = _V1.get_variable("w", initializer=_WEIGHT, use_resource=False)
    return {"x": x}, {"y": tf.matmul(x, weight)}


def _resources(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    x = _V1.placeholder(tf.float32, [None, 4], name="x")
    weight = _V1.get_variable("w", initializer=_WEIGHT, use_resource=True)
    return {"x": x}, {"y": tf.matmul(x, weight), "z": tf.nn.relu(x)}


def _conv(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    image = _V1.placeholder(tf.float32, [None, 8, 8, 1], name="image")
    kernel = _V1.get_variable("k", initializer=np.ones((3, 3, 1, 4), np.float32))
    return {"image": image}, {"y": tf.nn.relu(tf.nn.conv2d(image, kernel, 1, "SAME"))}


def _words(path: Path) -> Any:
    file = path.parent / f"{path.name}.txt"
    file.write_text("\n".join(WORDS))
    kind = tf.lookup.TextFileIndex
    return tf.lookup.TextFileInitializer(
        str(file), tf.string, kind.WHOLE_LINE, tf.int64, kind.LINE_NUMBER
    )


def _embedded(ids: Any) -> Any:
    table = _V1.get_variable("table", initializer=np.arange(20, dtype="f4").reshape(10, 2))
    return tf.nn.embedding_lookup(table, ids)


def _asset(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _V1.placeholder(tf.string, [None], name="text")
    table = _V1.lookup.StaticHashTable(_words(path), 9)
    return {"text": text}, {"y": _embedded(table.lookup(text))}


def _asset_of_buckets(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _V1.placeholder(tf.string, [None], name="text")
    table = _V1.lookup.StaticVocabularyTable(_words(path), 2)
    return {"text": text}, {"y": _embedded(table.lookup(text))}


def _pairs(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    ids = _V1.placeholder(tf.int64, [None], name="ids")
    pairs = tf.lookup.KeyValueTensorInitializer(
        tf.constant([1, 3], tf.int64), tf.constant([5, 6], tf.int64)
    )
    table = _V1.lookup.StaticHashTable(pairs, 0)
    return {"ids": ids}, {"y": _embedded(table.lookup(ids)), "n": table.size()}


def _bucket(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    text = _V1.placeholder(tf.string, [None], name="text")
    return {"text": text}, {"y": _embedded(tf.strings.to_hash_bucket_fast(text, 10))}
