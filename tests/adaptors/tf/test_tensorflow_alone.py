"""Tables of embeddings: floats outside, bytes inside."""

import numpy as np
import pytest
import tensorflow as tf
from machine import machine

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audit_ops
from neural_mp.space import list_effective_ops
from neural_mp.testing import uniform

INT8 = Precision.INT8
ROWS, WIDTH = 50, 16
NUMBERS = np.random.default_rng(0).integers(0, ROWS, (3, 7))
MACHINE = machine()


class Looked:
    """A graph that reads rows of a table, in FP32 and with the table in bytes."""

    def __init__(self, table, numbers=NUMBERS, read=None):
        graph = tf.Graph()
        with graph.as_default():
            fed = tf.compat.v1.placeholder(numbers.dtype, [None, 7], "fed")
            rows = (read or tf.gather)(tf.constant(table), fed)
            tf.identity(tf.nn.relu(rows), "out")
        self.adaptor, self.numbers = TensorFlowAdaptor(), numbers
        self.float = self.adaptor.load(graph, outputs=["out"])
        self.space = self.adaptor.space(self.float, MACHINE)
        (self.op,) = (op.name for op in self.space.graph if op.type == "GatherV2")
        observations = self.adaptor.observe(self.float, [numbers], self.space)
        self.plan = self.space.resolve(uniform(self.space, INT8))
        self.model = self.adaptor.convert(self.float, self.plan, observations, self.space)
        ran = self.adaptor.trace_kernels(self.model, numbers)
        assert not audit_ops(
            list_effective_ops(self.space, self.plan), ran, lambda _: False
        ).findings

    def results(self):
        return [self.adaptor.predict(m, self.numbers) for m in (self.float, self.model)]


def draw(*shape):
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_rows_of_a_table_are_exact_to_half_a_step_of_their_own(kind):
    table = draw(ROWS, WIDTH) * np.logspace(-3, 3, ROWS, dtype=np.float32)[:, None]
    looked = Looked(table, NUMBERS.astype(kind))
    step = np.abs(table).max(axis=1, keepdims=True) / 127
    _, result = looked.results()
    error = np.abs(result - np.maximum(table[NUMBERS], 0)) / step[NUMBERS]
    assert 0 < error.max() <= 0.5001
    assert looked.plan.plan[looked.op].precision is INT8


def test_a_table_takes_a_quarter_and_four_bytes_a_row():
    looked = Looked(draw(ROWS, WIDTH))
    float_bytes, int8_bytes = (looked.adaptor.weight_bytes(m) for m in (looked.float, looked.model))
    assert float_bytes - int8_bytes == ROWS * WIDTH * 4 - ROWS * (WIDTH + 4)


@pytest.mark.parametrize(
    ("width", "read", "reason"),
    [
        (4, None, "increase its size"),
        (WIDTH, lambda table, i: tf.gather(table, i % WIDTH, axis=1), "no integer kernel"),
        (WIDTH, lambda table, i: tf.gather(table * tf.cast(i[0, 0], tf.float32), i), "kernel"),
    ],
    ids=["short rows", "columns", "a table that is computed"],
)
def test_other_tables_stay_as_they_are(width, read, reason):
    looked = Looked(draw(ROWS, width), read=read)
    assert reason in looked.space.capabilities[looked.op].reasons[INT8]
    np.testing.assert_array_equal(*looked.results())
