"""The nets of the search benchmark in Keras, with the weights of those in torch.

Layers bear the names that modules have in torch, points as underscores.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers, ops

from benchmarks.nets.search_nets import Residual, Transformer, search_net

_EPSILON = 1e-5  # torch's, of both kinds of norm


def _convolution(x, channels: int, name: str, kernel: int = 3, bias: bool = True):
    return layers.Conv2D(channels, kernel, padding="same", use_bias=bias, name=name)(x)


def _normed(x, channels: int, name: str, norm: str, kernel: int = 3):
    x = _convolution(x, channels, name, kernel, bias=False)
    return layers.BatchNormalization(epsilon=_EPSILON, name=norm)(x)


def convolutions(channels: tuple[int, ...]) -> keras.Model:
    inputs = x = keras.Input((8, 8, 1), name="image")
    for index, width in enumerate(channels):
        x = layers.ReLU()(_convolution(x, width, f"convs_{index}"))
        if index + 1 == len(channels) // 2:
            x = layers.MaxPooling2D(2)(x)
    return keras.Model(inputs, layers.Dense(10, name="head")(layers.GlobalAveragePooling2D()(x)))


def residual() -> keras.Model:
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.ReLU()(_normed(inputs, 64, "stem", "norm"))
    for index, width in enumerate(Residual.WIDTHS):
        if index == Residual.HALVED:
            x = layers.MaxPooling2D(2)(x)
        of = f"blocks_{index}_"
        y = layers.ReLU()(_normed(x, width, of + "conv1", of + "norm1"))
        y = _normed(y, width, of + "conv2", of + "norm2")
        if x.shape[-1] != width:
            x = _normed(x, width, of + "project", of + "norm3", kernel=1)
        x = layers.ReLU()(layers.Add()([y, x]))
    return keras.Model(inputs, layers.Dense(10, name="head")(layers.GlobalAveragePooling2D()(x)))


class Position(layers.Layer):
    """Adds what was learnt for every place."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.position = self.add_weight(shape=(1, *shape[1:]), name="position")

    def call(self, x):
        return x + self.position


def _attention(x, of: str, width: int, heads: int):
    size = width // heads

    def split(name: str):
        y = layers.Reshape((16, heads, size))(layers.Dense(width, name=of + name)(x))
        return ops.transpose(y, (0, 2, 1, 3))

    scores = ops.matmul(split("query"), ops.transpose(split("key"), (0, 1, 3, 2))) * size**-0.5
    mixed = ops.transpose(ops.matmul(ops.softmax(scores), split("value")), (0, 2, 1, 3))
    return layers.Dense(width, name=of + "out")(layers.Reshape((16, width))(mixed))


def transformer() -> keras.Model:
    width = Transformer.WIDTH
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.Reshape((16, width))(layers.Conv2D(width, 2, 2, name="patch")(inputs))
    x = Position(name="position")(x)
    for index in range(Transformer.DEPTH):
        of = f"layers_{index}_"
        y = layers.LayerNormalization(epsilon=_EPSILON, name=of + "norm1")(x)
        x = layers.Add()([x, _attention(y, of, width, Transformer.HEADS)])
        y = layers.LayerNormalization(epsilon=_EPSILON, name=of + "norm2")(x)
        y = ops.gelu(layers.Dense(4 * width, name=of + "wide")(y), approximate=False)
        x = layers.Add()([x, layers.Dense(width, name=of + "narrow")(y)])
    x = layers.LayerNormalization(epsilon=_EPSILON, name="norm")(x)
    return keras.Model(inputs, layers.Dense(10, name="head")(ops.mean(x, 1)))


def _copy(arrays: dict[str, np.ndarray], net: keras.Model) -> None:
    """The weights of the torch net into the layers of the same names."""
    for layer in net.layers:
        if not layer.weights:
            continue
        parameters = {
            key.rpartition(".")[2]: a for key, a in arrays.items() if _is_of(key, layer.name)
        }
        weight = parameters.get("weight", parameters.get("position"))
        if weight.ndim == 4:
            weight = weight.transpose(2, 3, 1, 0)
        elif weight.ndim == 2:
            weight = weight.T
        rest = [
            parameters[key] for key in ("bias", "running_mean", "running_var") if key in parameters
        ]
        layer.set_weights([weight, *rest])


def _is_of(key: str, layer: str) -> bool:
    module, _, _ = key.rpartition(".")
    return (module or key).replace(".", "_") == layer


def keras_net(name: str) -> keras.Model:
    """The counterpart of `search_net(name)`."""
    source = search_net(name)
    if isinstance(source, Transformer):
        net = transformer()
    elif isinstance(source, Residual):
        net = residual()
    else:
        net = convolutions(tuple(conv.out_channels for conv in source.convs))
    _copy({key: value.numpy() for key, value in source.state_dict().items()}, net)
    return net
