"""A Keras net for scikit-learn's handwritten digits: 1797 images of 8×8 pixels."""

from __future__ import annotations

import os
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

MODEL = Path(__file__).parent / "out" / "digits_net.keras"


def residual(x, channels: int, stride: int, name: str):
    y = layers.Conv2D(channels, 3, stride, "same", activation="relu", name=f"{name}_first")(x)
    y = layers.Conv2D(channels, 3, padding="same", name=f"{name}_second")(y)
    if stride != 1:
        x = layers.Conv2D(channels, 1, stride, name=f"{name}_shortcut")(x)
    return layers.ReLU(name=f"{name}_relu")(layers.Add(name=f"{name}_sum")([y, x]))


def digits_net() -> keras.Model:
    """A small ResNet; input float32 [batch, 8, 8, 1] in 0…1, output 10 logits."""
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(64, 3, padding="same", activation="hard_silu", name="stem")(inputs)
    x = residual(residual(x, 64, 1, "block1"), 128, 2, "block2")
    x = layers.GlobalAveragePooling2D(name="pool")(residual(x, 128, 1, "block3"))
    return keras.Model(inputs, layers.Dense(10, name="head")(x), name="digits")


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


def trained_net() -> keras.Model:
    """The net, trained the first time it is asked for."""
    if not MODEL.exists():
        print("training a net on scikit-learn's digits (about fifteen seconds) …")
        keras.utils.set_random_seed(0)
        net, data = digits_net(), Digits("train")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.AdamW(2e-3), loss)
        net.fit(data.images, data.labels, epochs=8, batch_size=64, verbose=0)
        MODEL.parent.mkdir(exist_ok=True)
        net.save(MODEL)
    return keras.models.load_model(MODEL)
