"""Chains of small ops with results that exceed memory, and graphs that fail while they run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph.runtime import Runner
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    GraphDef,
    count_constant_bytes,
)
from neural_mp.errors import ConversionError

ADAPTOR = TensorFlowAdaptor()
X = np.ones((2, 4), np.float32)


def _graph(run: Callable[[Any], Any], dtype: Any = tf.float32) -> GraphDef:
    spec = tf.TensorSpec([None, 4], dtype, name="x")
    return tf.function(run).get_concrete_function(spec).graph.as_graph_def()


def _filled(x: Any) -> Any:
    """A gigabyte of a size that is itself computed."""
    size = tf.raw_ops.Mul(x=tf.constant([16, 16]), y=tf.constant([1024, 1024]))
    return x + tf.reduce_max(tf.raw_ops.Fill(dims=size, value=2.0))


def _repeated(x: Any) -> Any:
    values = tf.constant([1.0, 2.0])
    for _ in range(4):
        values = tf.raw_ops.Tile(input=values, multiples=[100])
    return x + tf.reduce_max(values)


def _multiplied(x: Any) -> Any:
    row = tf.raw_ops.Range(start=0.0, limit=16384.0, delta=1.0)
    return x + tf.reduce_min(tf.raw_ops.Mul(x=row[:, None], y=row[None, :])) + 2.0


def _counted(x: Any) -> Any:
    """Data decide on the size, so that it is not known before."""
    size = tf.raw_ops.Unique(x=tf.constant([16384, 16383, 16384]))[0]
    return x + tf.reduce_max(tf.raw_ops.Fill(dims=size, value=2.0))


def _joined(x: Any) -> Any:
    text = tf.constant("a" * 1024)
    for _ in range(20):
        text = tf.raw_ops.StringJoin(inputs=[text, text])
    return x + tf.cast(tf.raw_ops.StringLength(input=text), tf.float32) / 2.0**29


@pytest.mark.parametrize("run", [_filled, _repeated, _multiplied, _counted, _joined])
def test_constants_with_large_results_are_not_computed_on_loading(run, monkeypatch):
    """Each of these graphs has a few kilobytes, and may as well describe terabytes."""
    sizes: list[int] = []
    call = Runner.__call__

    def recorded(self: Runner, feeds: Any, fetches: Any) -> Any:
        results = call(self, feeds, fetches)
        sizes.extend(np.asarray(value).nbytes for value in results)
        return results

    monkeypatch.setattr(Runner, "__call__", recorded)
    model = ADAPTOR.load(_graph(run))
    assert max(sizes, default=0) < 1 << 20
    assert sum(map(count_constant_bytes, model.graph.nodes.values())) < 1 << 20
    assert {"Fill", "Tile", "Mul", "StringJoin"} & {n.op for n in model.graph.nodes.values()}


def test_small_results_are_computed_on_loading():
    def run(x: Any) -> Any:
        size = tf.raw_ops.Mul(x=tf.constant([2, 1]), y=tf.constant([2, 4]))
        weight = tf.raw_ops.Transpose(x=tf.raw_ops.Fill(dims=size, value=3.0), perm=[1, 0])
        return tf.raw_ops.MatMul(a=x, b=weight)

    model = ADAPTOR.load(_graph(run))
    ops = {node.op for node in model.graph.nodes.values()}
    assert ops <= {CONSTANT, "Placeholder", "MatMul", "Identity"}
    np.testing.assert_allclose(ADAPTOR.predict(model, X), X @ np.full((4, 4), 3, np.float32))


def test_a_result_whose_size_depends_on_values_is_left_to_the_runtime():

    def run(x: Any) -> Any:
        size = tf.raw_ops.Unique(x=tf.constant([4, 4, 4]))[0]
        return x * tf.raw_ops.Fill(dims=size, value=3.0)

    model = ADAPTOR.load(_graph(run))
    np.testing.assert_array_equal(ADAPTOR.predict(model, X), 3 * X)


@pytest.mark.parametrize(
    ("run", "words"),
    [
        (lambda x: tf.reshape(x, tf.cast(x[0, :2], tf.int32)), "InvalidArgumentError"),
        (lambda x: tf.debugging.check_numerics(x / 0.0, "wrong"), "InvalidArgumentError: wrong"),
        (lambda x: tf.gather(x, tf.cast(x[0] * 100, tf.int32)), "InvalidArgumentError"),
    ],
    ids=["sizes", "numerics", "indices"],
)
def test_a_graph_that_fails_while_it_runs_is_one_error(run, words):
    model = ADAPTOR.load(_graph(run))
    with pytest.raises(ConversionError, match=f"TensorFlow fails to run the graph: {words}"):
        ADAPTOR.predict(model, X)
