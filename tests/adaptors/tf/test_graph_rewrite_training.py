"""Training within the graph rewrite: casts, loss scale of every step, weights afterwards."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from graph_rewrite_nets import RULE, needs_pass
from tensorflow.python.eager import context

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import V1LossScaleOptimizer
from neural_mp.core.training_numerics import LossScale
from neural_mp.training import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)

v1 = tf.compat.v1
pytestmark = pytest.mark.usefixtures("rewrite_disabled_afterwards")


@pytest.mark.slow
@needs_pass
@pytest.mark.parametrize("make", [keras.optimizers.SGD, v1.train.GradientDescentOptimizer])
@pytest.mark.parametrize("compiled", [True, False])
def test_a_step_that_xla_compiles_warns_that_the_rewrite_does_not_see_it(make, compiled):
    wrapped = enable_mixed_precision_graph_rewrite(make(0.1))
    weight = keras.Variable(np.ones(3, np.float32)) if make is keras.optimizers.SGD else None
    plain = tf.Variable([1.0, 2.0])

    @tf.function(jit_compile=compiled)
    def step():
        if weight is not None:
            wrapped.apply([tf.ones(3)], [weight])
        else:
            wrapped.minimize(lambda: tf.reduce_sum(plain), var_list=[plain])

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step()
    caught = [
        str(entry.message) for entry in caught if "XLA compiles the step" in str(entry.message)
    ]
    assert bool(caught) == compiled
    disable_mixed_precision_graph_rewrite()


class Training:
    """Three numbers made smaller by an optimizer of TensorFlow 1; every step may be spoiled."""

    def __init__(self, wrapped, how):
        self.optimizer, self.how = wrapped, how
        if how != "graph":
            self.weight, self.factor = tf.Variable([1.0, 2.0, 3.0]), tf.Variable(1.0)
            self._run = tf.function(self._step) if how == "function" else self._step
            return
        self.session = v1.Session(graph=tf.Graph())
        with self.session.graph.as_default():
            self.weight = v1.get_variable("weight", initializer=[1.0, 2.0, 3.0])
            self.factor = v1.placeholder(tf.float32, [])
            rows = tf.gather(self.weight, [0, 2])  # its gradient is sparse
            loss = self.factor * tf.reduce_sum(tf.square(rows))
            self.steps = v1.train.create_global_step()
            self.train = wrapped.minimize(loss, global_step=self.steps)
            self.state = (wrapped.loss_scale, wrapped.skipped_steps, wrapped.skipped_in_a_row)
            self.session.run(v1.global_variables_initializer())

    def _step(self):
        self.optimizer.minimize(
            lambda: self.factor * tf.reduce_sum(tf.square(self.weight)), var_list=[self.weight]
        )

    def after(self, finite):
        """The numbers, the scale, and the counters of skipped steps after one more step."""
        factor, optimizer = 1.0 if finite else np.inf, self.optimizer
        if self.how == "graph":
            self.session.run(self.train, {self.factor: factor})
            return self.session.run((self.weight, *self.state))
        self.factor.assign(factor)
        self._run()
        values = (optimizer.loss_scale, optimizer.skipped_steps, optimizer.skipped_in_a_row)
        return (self.weight.numpy(), *(value.numpy() for value in values))


@pytest.mark.slow
@needs_pass
@pytest.mark.parametrize("how", ["graph", "function", "eager"])
@pytest.mark.parametrize("rule", [RULE, LossScale.fixed(3.0)], ids=["dynamic", "fixed"])
def test_optimizers_of_tensorflow_1_go_by_the_rule_step_by_step(how, rule):
    wrapped = enable_mixed_precision_graph_rewrite(v1.train.GradientDescentOptimizer(0.01), rule)
    training, state = Training(wrapped, how), rule.start()
    previous = np.array([1.0, 2.0, 3.0], np.float32)
    for finite in map(bool, (1, 1, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 0, 1)):
        state = rule.after(state, finite)
        weight, *counters = training.after(finite)
        assert counters == [state.scale, state.skipped_steps, state.skipped_in_a_row]
        assert np.array_equal(weight, previous) != finite
        assert np.isfinite(weight).all()
        previous = weight
    if how == "graph":
        assert training.session.run(training.steps) == state.steps
        training.session.close()


def test_without_loss_scaling_or_with_it_the_steps_are_the_same():
    """The scale is a power of two: it changes no bit of a gradient in float32."""
    weights = tf.Variable([0.1, 0.2, 0.3]), tf.Variable([0.1, 0.2, 0.3])
    plain = v1.train.AdamOptimizer(0.1)
    ours = V1LossScaleOptimizer(v1.train.AdamOptimizer(0.1), LossScale())
    for _ in range(5):
        for optimizer, weight in zip((plain, ours), weights, strict=True):
            optimizer.minimize(
                lambda weight=weight: tf.reduce_sum(tf.square(weight)), var_list=[weight]
            )
    np.testing.assert_array_equal(*(weight.numpy() for weight in weights))


def child(code, **variables):
    paths = os.pathsep.join([str(Path(__file__).parents[3]), os.environ["PYTHONPATH"]])
    environment = {**os.environ, "PYTHONPATH": paths, "TF_CPP_MIN_LOG_LEVEL": "3", **variables}
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )


WITHOUT_ONEDNN = """
import keras
from neural_mp.training import enable_mixed_precision_graph_rewrite
enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(), precision="BFLOAT16")
"""


@pytest.mark.slow
def test_where_onednn_is_off_the_error_names_the_variable():
    done = child(WITHOUT_ONEDNN, TF_ENABLE_ONEDNN_OPTS="0")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "UnsupportedPrecisionError" in last
    assert "TF_ENABLE_ONEDNN_OPTS=1 before TensorFlow is imported" in last


def fitted(optimizer, digits):
    """The weights after three epochs, and the casts to BF16 in the optimised graphs of `fit`."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(8, 3, activation="relu")])
    net.add(keras.layers.Flatten())
    net.add(keras.layers.Dense(10))
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(optimizer, loss, jit_compile=False)
    context.enable_graph_collection()
    net.fit(digits[0].images[:256], digits[0].labels[:256], epochs=3, verbose=0)
    graphs = context.context().export_run_metadata().function_graphs
    context.disable_graph_collection()
    casts, low = 0, tf.bfloat16.as_datatype_enum
    for graph in (entry.post_optimization_graph for entry in graphs):
        nodes = [*graph.node, *(n for f in graph.library.function for n in f.node_def)]
        casts += sum(n.op == "Cast" and n.attr["DstT"].type == low for n in nodes)
    return net.get_weights(), casts


@pytest.mark.slow
@needs_pass
def test_casts_to_bf16_are_in_the_optimised_graph_of_fit_and_gone_afterwards(digits):
    plain, none = fitted(keras.optimizers.SGD(0.05), digits)
    assert none == 0
    optimizer = enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.05))
    low, casts = fitted(optimizer, digits)
    # Of the images, two weights and two biases on the way there, and of gradients on the way back.
    assert 5 <= casts <= 20
    assert not all(map(np.array_equal, plain, low))
    disable_mixed_precision_graph_rewrite()
    again, none = fitted(keras.optimizers.SGD(0.05), digits)
    assert none == 0
    assert all(map(np.array_equal, plain, again))
