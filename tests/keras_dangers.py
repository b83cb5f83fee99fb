"""A Keras net on digits with two layers that 16 bits break, and the same net without them."""

import keras
from keras import layers


@keras.saving.register_keras_serializable("dangers")
class Energy(layers.Layer):
    """Adds the energy of its inputs; on the way to it are numbers beyond float16."""

    def call(self, x):
        energy = keras.ops.sum(keras.ops.square(x * 400), -1, keepdims=True)
        return keras.ops.concatenate([x, energy * 1e-4], -1)


@keras.saving.register_keras_serializable("dangers")
class Offset(layers.Layer):
    """Adds a number and takes it away again: 16 bits lose most of what was there."""

    def call(self, x):
        return (x + 256.0) - 256.0


def digits_net(dangerous: bool) -> keras.Model:
    """Two convolutions and three dense layers; weights are the same on every call."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8, 8, 1))
    x = layers.Conv2D(16, 3, activation="relu", name="conv1")(inputs)
    x = layers.Conv2D(32, 3, activation="relu", name="conv2")(x)
    x = layers.Flatten(name="flat")(x)
    if dangerous:
        x = Energy(name="energy")(x)
    x = layers.Dense(64, activation="relu", name="fc1")(x)
    if dangerous:
        x = Offset(name="offset")(x)
    x = layers.LayerNormalization(name="norm")(x)
    x = layers.Dense(64, activation="relu", name="fc2")(x)
    x = layers.Dense(10, name="logits")(x)
    return keras.Model(inputs, layers.Activation("softmax", name="softmax")(x))


def batches(split, size=64):
    """`(images, labels)` of a split, in order."""
    return [
        (split.images[i : i + size], split.labels[i : i + size])
        for i in range(0, len(split.images), size)
    ]
