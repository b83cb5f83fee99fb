"""The Keras models the benchmarks run: untrained, their batch norms as lively as after training."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers


def build(name: str) -> keras.Model:
    """A model by its name in `keras.applications`, or `bert`."""
    keras.utils.set_random_seed(0)
    net = encoder() if name == "bert" else getattr(keras.applications, name)(weights=None)
    draw = np.random.default_rng(0)
    for layer in net.layers:
        if isinstance(layer, layers.BatchNormalization):
            for weight in layer.weights:
                scales = weight.path.endswith(("gamma", "variance"))
                drawn = draw.uniform(0.5, 1.5, weight.shape)
                weight.assign(drawn if scales else draw.normal(0, 0.1, weight.shape))
        for weight in layer.weights:
            if weight.path.endswith(("bias", "beta")):
                weight.assign(draw.normal(0, 0.05, weight.shape))
    return net


def encoder(depth: int = 12, width: int = 768, heads: int = 12, length: int = 128) -> keras.Model:
    """An encoder of the size and build of BERT-base, with a head of two classes."""
    tokens = keras.Input((length,), dtype="int32", name="tokens")
    positions = layers.Embedding(512, width)(keras.ops.arange(length))
    x = layers.LayerNormalization(epsilon=1e-12)(layers.Embedding(30522, width)(tokens) + positions)
    for _ in range(depth):
        attended = layers.MultiHeadAttention(heads, width // heads)(x, x)
        x = layers.LayerNormalization(epsilon=1e-12)(layers.Add()([x, attended]))
        hidden = layers.Dense(4 * width, activation="gelu")(x)
        x = layers.LayerNormalization(epsilon=1e-12)(layers.Add()([x, layers.Dense(width)(hidden)]))
    return keras.Model(tokens, layers.Dense(2)(layers.Dense(width, activation="tanh")(x[:, 0])))
