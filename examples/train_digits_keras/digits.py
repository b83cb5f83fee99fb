"""A Keras net for scikit-learn's handwritten digits, with a layer that float16 breaks."""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

LOSS = "sparse_categorical_crossentropy"


@keras.saving.register_keras_serializable("digits")
class Energy(layers.Layer):
    """Adds the energy of the features. On the way to it are numbers above 65504."""

    def call(self, x):
        energy = keras.ops.sum(keras.ops.square(x * 400), -1, keepdims=True)
        return keras.ops.concatenate([x, energy * 1e-4], -1)


def digits_net() -> keras.Model:
    """Two convolutions and three dense layers; input float32 [batch, 8, 8, 1] in 0…1."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(16, 3, activation="relu", name="conv1")(inputs)
    x = layers.Conv2D(32, 3, activation="relu", name="conv2")(x)
    x = Energy(name="energy")(layers.Flatten(name="features")(x))
    x = layers.Dense(64, activation="relu", name="hidden")(x)
    x = layers.Dense(10, name="logits")(layers.LayerNormalization(name="norm")(x))
    return keras.Model(inputs, layers.Activation("softmax", name="predictions")(x), name="digits")


class Digits:
    """A dataset as neural_mp takes it: `dataset[i]` is `(image, label)`."""

    def __init__(self, split: str) -> None:
        data = load_digits()
        order = np.random.default_rng(0).permutation(len(data.target))
        chosen = {"train": order[:1200], "test": order[1200:]}[split]
        self.images = (data.images[chosen] / 16).astype(np.float32)[..., None]
        self.labels = data.target[chosen].astype(np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.int64]:
        return self.images[index], self.labels[index]
