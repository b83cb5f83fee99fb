"""Ops between two integer kernels compute what they compute in floats, up to rounding."""

from dataclasses import replace

import numpy as np
import pytest
import tensorflow as tf
from machine import machine

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph import fusion
from neural_mp.adaptors.tensorflow.graph.ops import OPS
from neural_mp.core.precision import Precision
from neural_mp.testing.graphs.graph_check import Verdict
from neural_mp.testing.graphs.tensorflow_graphs import (
    EVERYWHERE,
    ON_IMAGES,
    Draw,
    TensorFlowGraph,
    check_graph,
    drawn_graph,
)

KINDS = (*EVERYWHERE, *ON_IMAGES)


def between_convolutions(op):
    """A graph of an op between two convolutions, without activations."""
    draw = Draw(np.random.default_rng(0))
    with tf.Graph().as_default() as graph:
        x = tf.compat.v1.placeholder(tf.float32, [None, 6, 6, 4], name="x")
        first = op(tf.nn.conv2d(x, draw.floats(3, 3, 4, 4, scale=0.2), 1, "SAME"))
        tf.nn.conv2d(first, draw.floats(3, 3, first.shape[-1], 4), 1, "SAME", name="y")
    return TensorFlowGraph(graph, "", draw.floats(3, 6, 6, 4), "")


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_a_drawn_graph_is_right(kind):
    graph = drawn_graph(0, kind)
    outcome = check_graph(graph, machine())
    assert outcome.verdict is Verdict.RIGHT, f"{outcome.details}: {graph}"


@pytest.mark.parametrize("paddings", [[[0, 0], [0, 0]], [[1, 1], [2, 0]]])
def test_blocks_are_padded_with_zero_whatever_its_integer(paddings):
    def there_and_back(x):
        blocks = tf.raw_ops.SpaceToBatchND(input=x, block_shape=[2, 2], paddings=paddings)
        return tf.raw_ops.BatchToSpaceND(input=blocks, block_shape=[2, 2], crops=[[0, 0]] * 2)

    outcome = check_graph(between_convolutions(there_and_back), machine())
    assert outcome.verdict is Verdict.RIGHT, outcome.details


@pytest.mark.parametrize("rounds", [True, False])
def test_an_average_is_taken_in_integers_only_if_their_kernel_rounds(monkeypatch, rounds):
    monkeypatch.setattr(fusion, "rounds_averages", lambda: rounds)
    graph = between_convolutions(lambda x: tf.nn.avg_pool2d(x, 3, 3, "VALID", name="average"))
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(graph.graph, example=graph.feeds)
    assert ("average" in model.structure.agnostic_ops) is rounds
    reason = adaptor.space(model, machine()).capabilities["average"].reasons[Precision.INT8]
    assert ("truncates without oneDNN" in reason) is not rounds


def test_the_check_finds_a_wrong_kernel(monkeypatch):
    """The check itself: a pooling in INT8 that averages instead is found."""
    monkeypatch.setitem(OPS, "MaxPool", replace(OPS["MaxPool"], kernel="QuantizedAvgPool"))
    outcome = check_graph(
        between_convolutions(lambda x: tf.nn.max_pool2d(x, 2, 2, "SAME")), machine()
    )
    assert outcome.verdict is Verdict.WRONG_KERNEL
