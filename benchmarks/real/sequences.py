"""Keras recurrent nets, trained here: rows of digits, word borders in text, digits in reverse."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.real.case import Accuracy, Batches, Case, Share, Split
from benchmarks.real.texts import sentences
from neural_mp.testing import digits

BATCH, UNITS = 16, 256
#: Length of texts in characters, of digit strings in digits, and the number of symbols.
TEXT_LENGTH, STRING_LENGTH, SYMBOLS = 64, 6, 12
COUNTS = {"training": 2048, "calibration": 64, "test": 320}
SEEDS = {"training": 0, "calibration": 1, "test": 2}

Arrays = tuple[np.ndarray, np.ndarray]


def digit_rows(part: str) -> Arrays:
    """Return digits as eight rows of eight pixels, float32 [count, 8, 8], and their classes."""
    train, test = digits()
    if part == "test":
        return test.images[:, 0], test.labels
    rows = slice(64) if part == "calibration" else slice(None)
    return train.images[rows, 0], train.labels[rows]


def unspaced_text(part: str) -> Arrays:
    """Return characters without spaces, int32 [count, 64], and whether a word ends at each."""
    draw = np.random.default_rng(SEEDS[part])
    texts = sentences()
    bound = len(texts) * 3 // 4
    texts = texts[bound:] if part == "test" else texts[:bound]
    whole = " ".join(texts[i] for i in draw.permutation(len(texts)))
    spaces = np.array([c == " " for c in whole[1:]] + [True])
    characters = np.frombuffer(whole.encode("ascii", "replace"), np.uint8) & 127
    visible = characters != ord(" ")
    characters, ends = characters[visible].astype(np.int32), spaces[visible].astype(np.int64)
    starts = draw.integers(0, len(characters) - TEXT_LENGTH, COUNTS[part])
    positions = starts[:, None] + np.arange(TEXT_LENGTH)
    return characters[positions], ends[positions]


def reversed_digits(part: str) -> Arrays:
    """Return strings of digits, int32 [count, 6], and the same backwards."""
    draw = np.random.default_rng(SEEDS[part])
    strings = draw.integers(0, 10, (COUNTS[part], STRING_LENGTH), dtype=np.int32)
    return strings, strings[:, ::-1].astype(np.int64)


class RightSymbols(Share):
    """The share of positions whose highest score is at the label."""

    def update(self, preds: np.ndarray, labels: np.ndarray) -> None:
        self.count((np.asarray(preds).argmax(-1) == labels).ravel())


def lstm_classifier() -> Any:
    """Return [batch, 8, 8] → scores of ten classes."""
    from keras import Input, Sequential, layers

    return Sequential([Input((8, 8)), layers.LSTM(UNITS), layers.Dense(10)])


def bidirectional_tagger() -> Any:
    """Return characters of any length → two scores a character."""
    from keras import Input, Sequential, layers

    inner = layers.GRU(UNITS, return_sequences=True)
    return Sequential(
        [
            Input((None,), dtype="int32"),
            layers.Embedding(128, 64),
            layers.Bidirectional(inner),
            layers.Dense(2),
        ]
    )


def encoder_decoder() -> Any:
    """Return six digits → six times twelve scores, by an encoder and a decoder of GRUs."""
    from keras import Input, Sequential, layers

    return Sequential(
        [
            Input((STRING_LENGTH,), dtype="int32"),
            layers.Embedding(SYMBOLS, 64),
            layers.GRU(UNITS),
            layers.RepeatVector(STRING_LENGTH),
            layers.GRU(UNITS, return_sequences=True),
            layers.Dense(SYMBOLS),
        ]
    )


def _case(
    name: str,
    network: Callable[[], Any],
    data: Callable[[str], Arrays],
    epochs: int,
    metric: Callable[[], Any],
) -> Case:
    def trained(scratch: Path) -> Any:
        import keras

        file = scratch / f"{name}.keras"
        if not file.exists():
            keras.utils.set_random_seed(0)
            net = network()
            loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
            net.compile(keras.optimizers.Adam(2e-3), loss)
            net.fit(*data("training"), batch_size=64, epochs=epochs, verbose=0)
            net.save(file)
        return keras.models.load_model(file)

    def batches(split: Split) -> Batches:
        inputs, labels = data(split)
        parts = (slice(i, i + BATCH) for i in range(0, len(inputs) - BATCH + 1, BATCH))
        return Batches([(inputs[part], labels[part]) for part in parts], BATCH)

    return Case("tensorflow", trained, batches, metric, ())


LSTM = _case("lstm", lstm_classifier, digit_rows, 25, Accuracy)
BIDIRECTIONAL = _case("bidirectional", bidirectional_tagger, unspaced_text, 6, RightSymbols)
ENCODER_DECODER = _case("encoder_decoder", encoder_decoder, reversed_digits, 45, RightSymbols)
