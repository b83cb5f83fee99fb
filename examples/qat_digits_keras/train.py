"""Recover by training the accuracy that INT8 costs a narrow Keras net of depthwise convolutions."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
from keras import layers
from sklearn.datasets import load_digits

from neural_mp import training
from neural_mp.core.plan import PrecisionPlan

OUT = Path(__file__).parent / "out"
CHANNELS = 16
#: Layer → the op of its kernel.
KERNELS = {
    "stem": "convolution",
    "depthwise": "depthwise",
    "pointwise": "convolution",
    "head": "MatMul",
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def narrow_net() -> keras.Model:
    """Input float32 [batch, 8, 8, 1] in 0…1, output 10 logits."""
    image = keras.Input((8, 8, 1), name="image")
    x = layers.Conv2D(CHANNELS, 3, padding="same", activation="relu", name="stem")(image)
    x = layers.DepthwiseConv2D(3, padding="same", activation="relu", name="depthwise")(x)
    x = layers.Conv2D(2 * CHANNELS, 1, 2, activation="relu", name="pointwise")(x)
    return keras.Model(image, layers.Dense(10, name="head")(layers.Flatten()(x)), name="digits")


def digits() -> tuple[np.ndarray, np.ndarray]:
    """The images and labels in random order; the first 1200 are for training."""
    data = load_digits()
    order = np.random.default_rng(0).permutation(len(data.target))
    return (data.images[order] / 16).astype(np.float32)[..., None], data.target[order]


def give_outliers(net: keras.Model) -> None:
    """Keep the function, with channels of very different ranges, as in MobileNet."""
    factors = np.logspace(0, 3, CHANNELS).astype(np.float32)
    kernel, bias = net.get_layer("stem").get_weights()
    net.get_layer("stem").set_weights([kernel * factors, bias * factors])
    kernel, bias = net.get_layer("depthwise").get_weights()
    net.get_layer("depthwise").set_weights([kernel / factors[:, None], bias])


def main() -> None:
    keras.utils.set_random_seed(0)
    images, labels = digits()

    def accuracy(run: Callable[[np.ndarray], object]) -> float:
        return float(np.mean(np.asarray(run(images[1200:])).argmax(1) == labels[1200:]))

    net = narrow_net()
    net.compile(keras.optimizers.Adam(5e-3), LOSS)
    net.fit(images[:1200], labels[:1200], 50, epochs=8, verbose=0)
    give_outliers(net)
    plan = PrecisionPlan.from_dict(
        {f"digits_1/{layer}_1/{op}": "int8" for layer, op in KERNELS.items()}
    )

    simulation = training.quantization_aware(net, plan, calibration=[images[:200]])
    print(f"FP32: {accuracy(net):.3f}")
    print(f"INT8: {accuracy(training.finish(simulation).model):.3f}")

    rate = keras.optimizers.schedules.CosineDecay(5e-3, 24 * 10)
    simulation.compile(keras.optimizers.Adam(rate), LOSS)
    OUT.mkdir(exist_ok=True)
    saving = keras.callbacks.ModelCheckpoint(
        OUT / "last.weights.h5", save_weights_only=True, save_freq="epoch"
    )
    simulation.fit(images[:1200], labels[:1200], 50, epochs=10, verbose=0, callbacks=[saving])
    result = training.finish(simulation)
    print(f"simulation after training: {accuracy(simulation):.3f}")
    print(f"INT8 after training: {accuracy(result.model):.3f}")

    resumed = training.quantization_aware(net, plan, calibration=[images[:200]])
    resumed.load_weights(OUT / "last.weights.h5")
    print(f"INT8 from the file: {accuracy(training.finish(resumed).model):.3f}")
    result.save(OUT / "trained")


if __name__ == "__main__":
    main()
