"""Text models with lookup tables: tuned on strings, saved, and run by TensorFlow alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.core.precision import Precision
from neural_mp.testing import Accuracy

pytestmark = pytest.mark.slow

GOOD = ("great", "lovely", "fine", "superb", "bright")
BAD = ("awful", "dull", "poor", "broken", "sad")
NEITHER = ("the", "film", "plot", "was", "and", "very")

ALONE = """
import sys
import numpy as np, tensorflow as tf
texts = np.load("texts.npy")
for form in sys.argv[1:]:
    run = tf.saved_model.load(f"{form}/tuned").signatures["serving_default"]
    (name,) = run.structured_input_signature[1]
    (result,) = run(**{name: tf.constant(texts)}).values()
    np.save(f"{form}/alone.npy", result.numpy())
assert "neural_mp" not in sys.modules
"""


def _reviews(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return short texts, and whether they are good."""
    draw = np.random.default_rng(seed)
    labels = draw.integers(0, 2, count)
    lines = [
        [*draw.choice(NEITHER, 4), *draw.choice(GOOD if label else BAD, 2), f"unknown{index}"]
        for index, label in enumerate(labels)
    ]
    texts = [" ".join(draw.permutation(line)).capitalize() + "!" for line in lines]
    return np.array(texts), labels


def _from_words() -> keras.Model:
    texts, labels = _reviews(600, 0)
    vectorizer = layers.TextVectorization(output_sequence_length=8)
    vectorizer.adapt(texts)
    inputs = keras.Input((), dtype="string", name="text")
    x = layers.Embedding(vectorizer.vocabulary_size(), 16)(vectorizer(inputs))
    x = layers.GlobalAveragePooling1D()(layers.Conv1D(16, 3, activation="relu")(x))
    net = keras.Model(inputs, layers.Dense(2)(layers.Dense(16, activation="relu")(x)))
    net.compile(
        keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    )
    net.fit(tf.constant(texts), labels, epochs=6, verbose=0)
    return net


def _exported(net: keras.Model, folder: Path, form: str) -> str:
    path = folder / ("net" if form == "savedmodel" else "net.keras")
    if form == "savedmodel":
        net.export(path, verbose=False)
    else:
        net.save(path)
    return str(path)


def _tuned(net: keras.Model, folder: Path, form: str) -> np.ndarray:
    """Tune and save a model that comes in a form of file; return its outputs."""
    texts, labels = _reviews(200, 1)
    batches = [(texts[i : i + 50], labels[i : i + 50]) for i in range(0, 200, 50)]
    converter = MixedPrecision(
        model=_exported(net, folder, form),
        precisions="int8",
        metric=Accuracy(),
        eval_dataloader=batches,
        calib_dataloader=batches[:2],
        objective="modelsize",
        workspace=folder / "workspace",
        cache=False,
    )
    result = converter()
    assert result.met
    assert any(config.precision is Precision.INT8 for config in result.plan.values())
    outputs = np.asarray(result(texts))
    expected = net(tf.constant(texts)).numpy()
    assert np.mean(outputs.argmax(-1) == expected.argmax(-1)) > 0.98
    assert np.mean(outputs.argmax(-1) == labels) > 0.9

    result.save(folder / "tuned")
    np.testing.assert_array_equal(neural_mp.load(folder / "tuned")(texts), outputs)
    return outputs


def test_text_models_are_tuned_on_strings_saved_and_served_without_neural_mp(tmp_path):
    net, outputs = _from_words(), {}
    for form in ("keras", "savedmodel"):
        (tmp_path / form).mkdir()
        outputs[form] = _tuned(net, tmp_path / form, form)
    np.save(tmp_path / "texts.npy", _reviews(200, 1)[0])
    done = subprocess.run(
        [sys.executable, "-c", ALONE, *outputs], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for form, expected in outputs.items():
        np.testing.assert_array_equal(np.load(tmp_path / form / "alone.npy"), expected)
