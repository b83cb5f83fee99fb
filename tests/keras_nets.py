"""The Keras nets the tests train, counterparts of those in `nets`; images have channels last."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import pytest
from keras import layers

from neural_mp.testing import Split, digits


def channels_last() -> tuple[Split, Split]:
    """Training and test split of the digits; images [8, 8, 1] in 0…1."""
    train_part, test_part = (
        Split(part.images.transpose(0, 2, 3, 1).copy(), part.labels) for part in digits()
    )
    return train_part, test_part


class ChannelsLast:
    """For contracts: the digits as Keras nets take them."""

    @pytest.fixture(scope="session")
    @classmethod
    def digits(cls) -> tuple[Split, Split]:
        return channels_last()


def _normed(x, channels: int, kernel: int, stride: int = 1, activation: str | None = None):
    x = layers.Conv2D(channels, kernel, stride, padding="same", use_bias=False)(x)
    x = layers.BatchNormalization(momentum=0.9)(x)
    return layers.Activation(activation)(x) if activation else x


def _residual(x, channels: int, stride: int):
    y = _normed(_normed(x, channels, 3, stride, "relu"), channels, 3)
    if stride != 1 or x.shape[-1] != channels:
        x = _normed(x, channels, 1, stride)
    return layers.Activation("relu")(layers.Add()([y, x]))


def small_net() -> keras.Model:
    """Residual blocks behind a pooled stem; [batch, 8, 8, 1] → 10 logits."""
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(16, 3, padding="same", activation="relu")(inputs)
    x = layers.MaxPooling2D(2)(x)
    x = _residual(_residual(x, 16, 1), 32, 2)
    x = layers.Dropout(0.1)(layers.GlobalAveragePooling2D()(x))
    return keras.Model(inputs, layers.Dense(10, name="head")(x))


def deep_net() -> keras.Model:
    """8 convolutions and 1 dense layer."""
    net = keras.Sequential([keras.Input((8, 8, 1))])
    for index in range(8):
        net.add(layers.Conv2D(32, 3, padding="same", activation="relu"))
        if index == 3:
            net.add(layers.MaxPooling2D(2))
    net.add(layers.Flatten())
    net.add(layers.Dense(10))
    return net


def compile_briefly(net: keras.Model, optimizer: keras.Optimizer | str, loss: Any) -> None:
    """Compile a net for a training that takes less time than its preparation would.

    XLA compiles for longer than such a training takes; variables that the first step makes cost a
    second trace of it.
    """
    net.compile(optimizer, loss, jit_compile=False)
    net.optimizer.build(net.trainable_variables)


def compile_classifier(net: keras.Model) -> None:
    """Compile a net of logits for a brief training."""
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    compile_briefly(net, keras.optimizers.Adam(2e-3), loss)


def train(net: keras.Model, split, epochs: int) -> None:
    """Train a compiled net."""
    net.fit(split.images, split.labels, epochs=epochs, batch_size=64, verbose=0)


def hostile(net: keras.Model, factor: float = 1024.0) -> keras.Model:
    """The same function, with the busiest channel between convolutions 2 and 3 made ×1024."""
    changed = keras.models.clone_model(net)
    changed.set_weights(net.get_weights())
    first, second = [layer for layer in changed.layers if isinstance(layer, layers.Conv2D)][1:3]
    (weight, bias), (following, rest) = first.get_weights(), second.get_weights()
    channel = int((np.abs(weight).sum((0, 1, 2)) * np.abs(following).sum((0, 1, 3))).argmax())
    weight[..., channel] *= factor
    bias[channel] *= factor
    following[:, :, channel] /= factor
    first.set_weights([weight, bias])
    second.set_weights([following, rest])
    return changed


def train_once(
    split: Split,
    write_once: Callable[[str, Callable[[Path], None]], Path],
    make: Callable[[], keras.Model],
    epochs: int,
) -> keras.Model:
    """Return the net of a function after some epochs, which one process trains for all."""
    keras.utils.set_random_seed(0)
    net = make()
    compile_classifier(net)

    def train_and_save(file: Path) -> None:
        train(net, split, epochs)
        with file.open("wb") as stream:
            np.savez(stream, *net.get_weights())

    with np.load(write_once(f"keras-{make.__name__}.npz", train_and_save)) as weights:
        net.set_weights(list(weights.values()))
    return net
