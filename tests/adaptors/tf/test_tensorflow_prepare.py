"""Preparing a graph changes its form and not its numbers."""

from collections import Counter

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers, ops
from machine import machine

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

INT8 = Precision.INT8


def with_lively_norms(net):
    """Batch norms that do something, as after training."""
    draw = np.random.default_rng(0)
    for layer in net.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.set_weights(
                [draw.uniform(0.5, 2, w.shape).astype(np.float32) for w in layer.get_weights()]
            )
        elif isinstance(layer, layers.Dense | layers.Conv2D | layers.EinsumDense):
            kernel, *bias = layer.get_weights()
            layer.set_weights([kernel, *(draw.normal(0, 0.3, b.shape) for b in bias)])
    return net


def convolutions():
    x = inputs = Input((9, 9, 3))
    x = layers.BatchNormalization()(layers.Conv2D(8, 3, use_bias=False)(x))
    x = layers.ReLU(6.0)(layers.BatchNormalization()(layers.DepthwiseConv2D(3)(x)))
    x = layers.Conv2D(4, 1)(x)
    x = layers.Rescaling(0.5, offset=-0.2)(x)
    x = layers.BatchNormalization(scale=False)(x)
    return Model(inputs, x / 3.0 - 1.0)


def paddings():
    x = inputs = Input((12, 10, 3))
    x = layers.Conv2D(8, 3)(layers.ZeroPadding2D(1)(x))  # as SAME
    x = layers.Conv2D(8, 3, strides=2)(layers.ZeroPadding2D(((0, 1), (1, 2)))(x))
    x = layers.DepthwiseConv2D(3, strides=2)(layers.ZeroPadding2D(((0, 1), (0, 1)))(x))
    return Model(inputs, x)


def dense_layers():
    x = inputs = Input((6, 5))
    x = layers.Dense(12, activation="gelu")(x)
    x = layers.Dense(8, activation=lambda v: keras.activations.gelu(v, approximate=True))(x)
    x = layers.Dense(8, activation="tanh")(x)
    x = layers.LayerNormalization()(x + layers.EinsumDense("abc,cd->abd", (6, 8), bias_axes="d")(x))
    return Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


def attention():
    x = inputs = Input((6, 16))
    x = x + layers.MultiHeadAttention(4, 4)(x, x, use_causal_mask=True)
    return Model(inputs, layers.Dense(3)(x[:, 0]))


def open_sequence():
    x = inputs = Input((None, 16))
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 8)(x, x))
    x = layers.Dense(8, activation="relu")(x)
    return Model(inputs, ops.mean(x, axis=1))


def double_use():
    x = inputs = Input((6, 6, 2))
    shared = layers.Conv2D(2, 3, padding="same", activation="relu")
    first, second = shared(x), shared(x)
    return Model(inputs, layers.Concatenate()([first + second, shared(first)]))


NETS = (convolutions, paddings, dense_layers, attention, open_sequence, double_use)


def loaded(build):
    keras.utils.set_random_seed(0)
    net = with_lively_norms(build())
    adaptor = TensorFlowAdaptor()
    return net, adaptor, adaptor.load(net)


@pytest.mark.parametrize("build", NETS, ids=lambda build: build.__name__)
def test_numbers_stay(build):
    net, adaptor, model = loaded(build)
    draw = np.random.default_rng(1)
    for batch in (1, 5):
        data = draw.standard_normal((batch, *(size or 7 for size in net.input_shape[1:])))
        expected = np.asarray(net(data.astype(np.float32), training=False))
        outputs = adaptor.predict(model, data.astype(np.float32))
        # Constants are multiplied in another order: some roundings of float32.
        assert np.abs(outputs - expected).max() / np.abs(expected).max() < 5e-6


def kinds(model) -> Counter:
    return Counter(node.op for node in model.graph.nodes.values() if node.op != "Const")


def test_affine_chains_become_one_bias():
    assert kinds(loaded(convolutions)[2]) == {
        **dict.fromkeys(("Placeholder", "DepthwiseConv2dNative", "Relu6", "Identity"), 1),
        **{"Conv2D": 2, "BiasAdd": 3},
    }


def test_paddings_move_into_the_convolutions():
    _, _, model = loaded(paddings)
    assert "Pad" not in kinds(model)
    modes = [n.attr["padding"].s for n in model.graph.nodes.values() if "padding" in n.attr]
    assert modes == [b"SAME", b"EXPLICIT", b"SAME"]


def test_dense_layers_on_sequences_are_products_of_matrices():
    """With bias and activation right behind, and no reshaping between one and the next."""
    _, adaptor, model = loaded(dense_layers)
    counts = kinds(model)
    assert counts["MatMul"] == counts["BiasAdd"] == 5
    assert not {"BatchMatMulV2", "Einsum", "Shape", "Prod", "GatherV2", "Pack"} & set(counts)
    fusion_groups = Counter(op.fusion_group for op in adaptor.graph(model) if op.fusion_group)
    assert sorted(fusion_groups.values()) == [1, 1, 2, 6, 9]  # biases, tanh, the two forms of GELU


def test_projections_of_attention_are_products_of_matrices():
    counts = kinds(loaded(attention)[2])
    assert counts["MatMul"] == 5
    assert counts["BatchMatMulV2"] + counts["Einsum"] == 2  # of two computed factors each


def test_what_is_computed_twice_is_computed_once():
    assert kinds(loaded(double_use)[2])["Conv2D"] == 2


def test_constants_are_computed_beforehand():
    weight = tf.Variable(np.random.default_rng(0).random((20, 30)).astype(np.float32))

    @tf.function(input_signature=[tf.TensorSpec([None, 30])])
    def run(x):
        scaled = tf.transpose(weight) * tf.exp(tf.reduce_mean(weight))
        return tf.matmul(x, scaled / tf.norm(scaled))

    adaptor = TensorFlowAdaptor()
    model = adaptor.load(run)
    assert kinds(model) == {"Placeholder": 1, "MatMul": 1, "Identity": 1}
    data = np.ones((2, 30), np.float32)
    np.testing.assert_allclose(adaptor.predict(model, data), run(data).numpy(), rtol=1e-5)


def test_products_that_read_one_tensor_share_what_is_quantized():
    generator = np.random.default_rng(0)
    first, second = (generator.normal(size=(1, 8, 4)).astype(np.float32) for _ in range(2))
    x = Input((6, 8))
    hidden = ops.tanh(x)
    net = Model(x, ops.matmul(hidden, first) * ops.matmul(hidden, second))
    adaptor = TensorFlowAdaptor()
    space = adaptor.space(adaptor.load(net), machine())
    products = {op.name for op in space.graph if op.type == "MatMul"}
    assert len(products) == 2
    assert any(products <= set(tensor.consumers) for tensor in space.tensors)


@pytest.mark.parametrize("tokens", [None, 12])
def test_the_layers_of_attention_are_dense_layers_for_any_number_of_tokens(tokens):
    x = Input((tokens, 32))
    # Said, as Keras before 3.15 draws larger numbers, with which attention is all or nothing.
    drawn = keras.initializers.RandomUniform(-0.3, 0.3)
    attended = layers.MultiHeadAttention(4, 8, kernel_initializer=drawn)(x, x)
    net = Model(x, layers.Dense(16, activation="gelu")(attended))
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(net)
    space = adaptor.space(model, machine())
    assert sum(adaptor.graph(model)[op].type == "MatMul" for op in space.int8_ops) == 5
    data = [np.random.default_rng(i).normal(size=(3, 12, 32)).astype(np.float32) for i in (0, 1)]
    observed = adaptor.observe(model, data, space)
    converted = adaptor.convert(model, space.resolve(uniform(space, INT8)), observed, space)
    for length in (12,) if tokens else (5, 12, 24):
        batch = np.concatenate(data, axis=1)[:, :length]
        expected = net(batch).numpy()
        np.testing.assert_allclose(adaptor.predict(model, batch), expected, atol=1e-5)
        assert signal_to_noise(expected, adaptor.predict(converted, batch)) > 25
