"""Keras nets of the shapes that `.tflite` files have, trained within minutes on digits.

All read one channel of 48 × 48, the detector with up to three digits.
"""

from __future__ import annotations

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import applications, layers, ops
from keras.src.applications.efficientnet import EfficientNet  # of any size

from benchmarks.accelerators.fidelity import Detections
from benchmarks.accelerators.trained import Arrays, pictures, scenes
from benchmarks.real.case import Accuracy, Batches, Metric, Split

SIDE, STRIDE, CLASSES = 48, 8, 10
#: Samples for training, calibration and evaluation, and of a batch.
TRAINED, CALIBRATED, EVALUATED, BATCH = 2048, 64, 640, 32
_MOMENTUM = 0.9


def mobilenet() -> keras.Model:
    """MobileNetV3-Small, of half the width."""
    shape = (SIDE, SIDE, 1)
    return applications.MobileNetV3Small(
        shape, 0.5, weights=None, classes=CLASSES, dropout_rate=0.0, include_preprocessing=False,
        classifier_activation=None,
    )  # fmt: skip


def efficientnet() -> keras.Model:
    """EfficientNet, of half the width and depth of B0."""
    return EfficientNet(
        0.5, 0.5, SIDE, 0.0, 0.0, input_shape=(SIDE, SIDE, 1), weights=None, classes=CLASSES,
        classifier_activation=None,
    )  # fmt: skip


def transformer(width: int = 96, depth: int = 3, heads: int = 4, patch: int = 8) -> keras.Model:
    """A vision transformer with patches of 8 × 8."""
    inputs, cells = keras.Input((SIDE, SIDE, 1)), (SIDE // patch) ** 2
    x = layers.Reshape((cells, width))(layers.Conv2D(width, patch, patch)(inputs))
    x += layers.Embedding(cells, width)(ops.arange(cells))
    for _ in range(depth):
        y = layers.LayerNormalization()(x)
        x += layers.MultiHeadAttention(heads, width // heads)(y, y)
        y = layers.Dense(4 * width, activation="gelu")(layers.LayerNormalization()(x))
        x += layers.Dense(width)(y)
    x = ops.mean(layers.LayerNormalization()(x), 1)
    return keras.Model(inputs, layers.Dense(CLASSES)(x))


def _convolve(x: Any, channels: int, size: int = 3, stride: int = 1) -> Any:
    x = layers.Conv2D(channels, size, stride, "same", use_bias=False)(x)
    return layers.ReLU(6.0)(layers.BatchNormalization()(x))


def _separate(x: Any, channels: int, stride: int = 1) -> Any:
    x = layers.DepthwiseConv2D(3, stride, "same", use_bias=False)(x)
    x = layers.ReLU(6.0)(layers.BatchNormalization()(x))
    return _convolve(x, channels, 1)


def detector(width: int = 24) -> keras.Model:
    """A detector of two levels joined by a feature pyramid: [batch, 14, cells].

    The rows are left, top, right, bottom in pixels, and probabilities of classes.
    """
    inputs = keras.Input((SIDE, SIDE, 1))
    x = _separate(_convolve(inputs, width, 3, 2), 2 * width, 2)
    fine = layers.Add()([y := _separate(x, 4 * width, 2), _separate(y, 4 * width)])
    coarse = _separate(_separate(fine, 6 * width, 2), 6 * width)
    risen = layers.UpSampling2D(2, interpolation="bilinear")(_convolve(coarse, 4 * width, 1))
    joined = _separate(layers.Concatenate()([fine, risen]), 4 * width)
    cells = SIDE // STRIDE
    sides, logits = (
        layers.Reshape((cells**2, channels))(layers.Conv2D(channels, 1)(_separate(joined, width)))
        for channels in (4, CLASSES)
    )
    rows, columns = np.divmod(np.arange(cells**2, dtype=np.float32), cells)
    centers = np.stack([columns, rows], 1) + 0.5
    sides = ops.softplus(sides)
    boxes = ops.subtract(centers, sides[..., :2]), ops.add(centers, sides[..., 2:])
    rows = ops.concatenate([*(STRIDE * box for box in boxes), ops.sigmoid(logits)], -1)
    return keras.Model(inputs, ops.transpose(rows, (0, 2, 1)))


def _assign_cells(objects: np.ndarray) -> np.ndarray:
    """Return boxes, and scores of classes, of the cells with the centers of objects."""
    cells = SIDE // STRIDE
    targets = np.zeros((len(objects), 4 + CLASSES, cells**2), np.float32)
    scene, row = np.nonzero(objects[..., 4] >= 0)
    boxes = objects[scene, row]
    columns, rows = ((boxes[:, :2] + boxes[:, 2:4]) / 2 / STRIDE).astype(int).T
    cell = rows.clip(0, cells - 1) * cells + columns.clip(0, cells - 1)
    targets[scene, :4, cell] = boxes[:, :4]
    targets[scene, 4 + boxes[:, 4].astype(int), cell] = 1.0
    return targets


def _detection_loss(targets: Any, outputs: Any) -> Any:
    shown, probabilities = targets[:, 4:], ops.clip(outputs[:, 4:], 1e-6, 1 - 1e-6)
    errors = ops.sum(ops.binary_crossentropy(shown, probabilities))
    occupied = ops.max(shown, 1)
    apart = ops.sum(ops.mean(ops.abs(outputs[:, :4] - targets[:, :4]), 1) * occupied) / STRIDE
    return (errors + apart) / ops.sum(occupied)


def _draw_pictures(count: int, seed: int, noise: float = 1.0) -> Arrays:
    images, classes = pictures(count, seed, SIDE, noise)
    return images.transpose(0, 2, 3, 1).copy(), classes


def _draw_scenes(count: int, seed: int) -> Arrays:
    images, objects = scenes(count, seed, SIDE)
    return images.transpose(0, 2, 3, 1).copy(), objects


@dataclass(frozen=True)
class Recipe:
    """A net, its training and its data.

    Attributes:
        net: makes the untrained net.
        epochs: passes over the training data.
        data: count and seed → inputs and labels.
        metric: makes the metric of the evaluation.
        rate: the highest learning rate.
    """

    net: Callable[[], keras.Model]
    epochs: int
    data: Callable[[int, int], Arrays] = _draw_pictures
    metric: Callable[[], Metric] = Accuracy
    rate: float = 3e-3

    def make_batches(self, split: Split, seed: int) -> Batches:
        """Return the batches of a part of the data."""
        count, offset = (CALIBRATED, 1) if split == "calibration" else (EVALUATED, 2)
        inputs, labels = self.data(count, seed + offset)
        parts = (slice(i, i + BATCH) for i in range(0, count, BATCH))
        return Batches([(inputs[part], labels[part]) for part in parts], BATCH)


RECIPES: Mapping[str, Recipe] = {
    "MobileNetV3": Recipe(mobilenet, 12),
    "EfficientNet": Recipe(efficientnet, 8),
    "ViT": Recipe(transformer, 8, partial(_draw_pictures, noise=0.3), rate=1.5e-3),
    "detector": Recipe(detector, 20, _draw_scenes, Detections),
}


def train_net(name: str, seed: int, folder: Path) -> keras.Model:
    """Return a net by its name, trained from a seed, whose weights are kept in a folder."""
    recipe, file = RECIPES[name], folder / f"{name}-{seed}.weights.h5"
    keras.utils.set_random_seed(seed)
    net = recipe.net()
    if file.exists():
        net.load_weights(file)
        return net
    for layer in net.layers:
        if isinstance(layer, layers.BatchNormalization):
            layer.momentum = _MOMENTUM  # .999 is for longer trainings
    inputs, labels = recipe.data(TRAINED, seed)
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    if recipe.metric is Detections:
        loss, labels = _detection_loss, _assign_cells(labels)
    steps = recipe.epochs * TRAINED // BATCH
    rate = keras.optimizers.schedules.CosineDecay(
        0.0, steps, warmup_target=recipe.rate, warmup_steps=steps // 8
    )
    net.compile(keras.optimizers.Adam(rate), loss)
    net.fit(inputs, labels, batch_size=BATCH, epochs=recipe.epochs, verbose=0)
    folder.mkdir(parents=True, exist_ok=True)
    net.save_weights(file)
    return net
