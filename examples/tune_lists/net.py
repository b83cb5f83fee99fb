"""A Keras net with ops that the four lists keep out of 16 bits."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
from keras import layers, ops

HERE = Path(__file__).parent
MODEL = HERE / "out" / "net.keras"
sys.path.insert(0, str(HERE.parent / "tensorflow_digits"))

from digits import Digits  # noqa: E402


@keras.saving.register_keras_serializable("tune_lists")
class PowerPooling(layers.Layer):
    """Generalised-mean pooling, then attention over positions, as retrieval nets have them."""

    def call(self, features):
        pooled = ops.power(ops.average_pool(ops.power(features, 3.0), 2, 2), 1 / 3)
        weights = ops.softmax(pooled, axis=-1)
        return pooled * weights


def build() -> keras.Model:
    """Input float32 [batch, 8, 8, 1] in 0…1, output 10 logits."""
    inputs = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(32, 3, padding="same", activation="relu")(inputs)
    x = layers.Conv2D(64, 3, padding="same", activation="softplus")(x)
    x = layers.Flatten()(PowerPooling()(x))
    return keras.Model(inputs, layers.Dense(10)(x))


def trained() -> keras.Model:
    """The net, trained the first time it is asked for."""
    if not MODEL.exists():
        print("training a net on scikit-learn's digits (about ten seconds) …")
        keras.utils.set_random_seed(0)
        net, data = build(), Digits("train")
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(keras.optimizers.Adam(3e-3), loss)
        net.fit(data.images, data.labels, epochs=8, batch_size=64, verbose=0)
        MODEL.parent.mkdir(exist_ok=True)
        net.save(MODEL)
    return keras.models.load_model(MODEL)
