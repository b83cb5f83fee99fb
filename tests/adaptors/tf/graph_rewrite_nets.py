"""Nets and sessions for the tests of the graph rewrite."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from machine import has_rewrite_pass

from neural_mp.core.training_numerics import LossScale

v1 = tf.compat.v1
BF16, FP16 = "auto_mixed_precision_onednn_bfloat16", "auto_mixed_precision"
FILTERS = np.random.default_rng(0).normal(size=(3, 3, 1, 4)).astype(np.float32)
IMAGES = np.random.default_rng(1).random((2, 8, 8, 1), np.float32)
RULE = LossScale(initial=4.0, growth_interval=2, minimum=1.0, maximum=16.0)
needs_pass = pytest.mark.skipif(
    not has_rewrite_pass(), reason="TensorFlow's pass for BF16 does nothing on this machine"
)


def small_net(optimizer):
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, "relu")])
    net.add(keras.layers.Dense(10, "softmax"))
    net.compile(optimizer, "sparse_categorical_crossentropy", jit_compile=False)
    return net


def trained(optimizer, digits):
    """The weights after an epoch."""
    net = small_net(optimizer)
    images = np.asarray(digits[0].images, np.float32).reshape(-1, 64)[:256]
    net.fit(images, np.asarray(digits[0].labels)[:256], epochs=1, verbose=0)
    return net.get_weights()


def convolved(config=None):
    """Run a convolution in a session; return its result and the casts to BF16 in its graph."""
    with tf.Graph().as_default(), v1.Session(config=config) as session:
        filters = v1.get_variable("filters", initializer=FILTERS)
        result = tf.nn.relu(
            tf.nn.conv2d(v1.placeholder_with_default(IMAGES, None), filters, 1, "SAME")
        )
        session.run(v1.global_variables_initializer())
        metadata = v1.RunMetadata()
        options = v1.RunOptions(output_partition_graphs=True)
        values = session.run(tf.identity(result), options=options, run_metadata=metadata)
    nodes = [node for graph in metadata.partition_graphs for node in graph.node]
    low = tf.bfloat16.as_datatype_enum
    return values, sum(node.op == "Cast" and node.attr["DstT"].type == low for node in nodes)


def config_with(option, value):
    config = v1.ConfigProto(allow_soft_placement=True)
    setattr(config.graph_options.rewrite_options, option, value)
    return config
