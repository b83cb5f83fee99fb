"""Digit classifiers as TensorFlow 1 and 2 leave them: with assertions, with an unused save op."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real.case import Batches, Case, Share, Split
from neural_mp.testing import digits

BATCH, EPOCHS = 32, 30


class RightClasses(Share):
    """The share of samples whose highest score is at the label; scores may come by name."""

    def update(self, preds: Any, labels: np.ndarray) -> None:
        scores = next(iter(preds.values())) if isinstance(preds, dict) else preds
        self.count(np.asarray(scores).argmax(1) == labels)


def batches(split: Split) -> Batches:
    """Return batches of digits, float32 [32, 16, 16, 1]: every pixel four times."""
    part = digits()[split == "test"]
    count = 128 if split == "calibration" else len(part) // BATCH * BATCH
    images = part.images[:count, 0].repeat(2, 1).repeat(2, 2)[..., None]
    return Batches(
        [(images[i : i + BATCH], part.labels[i : i + BATCH]) for i in range(0, count, BATCH)],
        BATCH,
    )


def _trained() -> Any:
    import keras
    from keras import layers

    keras.utils.set_random_seed(0)
    widths = (32, 64, 128)
    net = keras.Sequential(
        [
            keras.Input((16, 16, 1)),
            *(layers.Conv2D(width, 3, padding="same", activation="relu") for width in widths),
            layers.GlobalAveragePooling2D(),
            layers.Dense(10),
        ]
    )
    train = digits()[0]
    images = train.images[:, 0].repeat(2, 1).repeat(2, 2)[..., None]
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    net.compile(keras.optimizers.Adam(3e-3), loss)
    net.fit(images, train.labels, batch_size=64, epochs=EPOCHS, verbose=0)
    return net


def with_assertions(scratch: Path) -> str:
    """Return a SavedModel that asserts the size and the range of its images."""
    import tensorflow as tf

    path = scratch / "asserting"
    if not path.exists():
        module = tf.Module()
        # Plain variables: TensorFlow 1 does not find those of Keras when it freezes.
        module.weights = [tf.Variable(weight) for weight in _trained().get_weights()]

        @tf.function(input_signature=[tf.TensorSpec((None, 16, 16, 1), tf.float32, name="images")])
        def serve(images: Any) -> Any:
            checks = [
                tf.debugging.assert_equal(tf.shape(images)[1], tf.shape(images)[2]),
                tf.debugging.assert_less_equal(images, 1.0),
            ]
            with tf.control_dependencies(checks):
                x = tf.identity(images)
            *convolutions, kernel, bias = module.weights
            for filters, offset in zip(convolutions[::2], convolutions[1::2], strict=True):
                x = tf.nn.relu(tf.nn.conv2d(x, filters, 1, "SAME") + offset)
            return {"scores": tf.reduce_mean(x, (1, 2)) @ kernel + bias}

        tf.saved_model.save(module, str(path), signatures=serve)
    return str(path)


def with_unused_save(scratch: Path) -> str:
    """Return a graph frozen as in TensorFlow 1; its library keeps the function that saves."""
    import tensorflow as tf

    path = scratch / "frozen.pb"
    if not path.exists():
        served, v1, graph = with_assertions(scratch), tf.compat.v1, tf.Graph()
        with v1.Session(graph=graph) as session:
            loaded = v1.saved_model.loader.load(session, ["serve"], served)
            outputs = loaded.signature_def["serving_default"].outputs.values()
            names = [tensor.name.split(":")[0] for tensor in outputs]
            frozen = v1.graph_util.convert_variables_to_constants(
                session, graph.as_graph_def(), names
            )
        path.write_bytes(frozen.SerializeToString())
    return str(path)


ASSERTIONS = Case("tensorflow", with_assertions, batches, RightClasses, ())
UNUSED_SAVE = Case("tensorflow", with_unused_save, batches, RightClasses, ())
