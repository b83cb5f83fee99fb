"""Keras nets of the contracts, counterparts of those in `contract_nets`."""

import keras
import numpy as np
from keras import layers, ops

from neural_mp.testing import FACTOR


def convolution(channels, **settings):
    return layers.Conv2D(channels, 3, padding="same", bias_initializer="random_normal", **settings)


def dense(channels):
    return layers.Dense(channels, bias_initializer="random_normal")


def scale(layer: layers.Layer, channel: int, factor: float, axis: int = -1) -> None:
    """Multiply one channel of the weight along an axis; with the last axis, of the bias too."""
    weight, bias = layer.get_weights()
    np.moveaxis(weight, axis, 0)[channel] *= factor
    if axis == -1:
        bias[channel] *= factor
    layer.set_weights([weight, bias])


def outliers(norm_factor: float = FACTOR) -> keras.Model:
    """See the contract; in groups of one channel, which is what has a kernel in integers."""
    image = keras.Input((8, 8, 1), name="image")
    first, last = convolution(12), convolution(12)
    grouped = layers.DepthwiseConv2D(
        3, padding="same", depth_multiplier=2, bias_initializer="random_normal"
    )
    norm = layers.LayerNormalization(beta_initializer="random_normal")
    query, key = dense(10), dense(10)
    features = ops.relu(grouped(ops.relu(first(image))))
    features = ops.relu(last(layers.MaxPooling2D(2)(features)))
    features = norm(layers.Reshape((16, 12))(features))
    net = keras.Model(image, query(features) * key(features))
    scale(first, 5, FACTOR)
    scale(grouped, 5, 1 / FACTOR, axis=2)
    weight, bias = grouped.get_weights()
    weight[:, :, 3, 1] *= FACTOR  # output 7 is the second of channel 3
    bias[7] *= FACTOR
    grouped.set_weights([weight, bias])
    scale(last, 7, 1 / FACTOR, axis=2)
    scale(norm, 5, norm_factor)
    scale(query, 5, 1 / norm_factor, axis=0)
    scale(key, 5, 1 / norm_factor, axis=0)
    return net


def residual() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    features = ops.relu(convolution(8)(image))
    return keras.Model(image, convolution(8)(features) + features)


def two_outputs() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    features = ops.relu(convolution(8)(image))
    return keras.Model(image, [convolution(8)(features), features])


def normed() -> keras.Model:
    image = keras.Input((8, 8, 1), name="image")
    norm = layers.LayerNormalization(beta_initializer=keras.initializers.RandomNormal(stddev=1))
    product = dense(16)
    net = keras.Model(image, product(norm(layers.Reshape((8, 8))(image))))
    scale(norm, 5, FACTOR)
    scale(product, 5, 1 / FACTOR, axis=0)
    return net


def seeded(build) -> keras.Model:
    keras.utils.set_random_seed(0)
    return build()
