"""Cases of Keras layers that prepare inputs: some compute, those that augment pass them on."""

from __future__ import annotations

import keras
import numpy as np
from keras import layers
from zoo.harness import Built
from zoo.keras_models import IMAGE, SAMPLES, Maker, alone, around, built, case, made, normal

_COUNTS = np.arange(SAMPLES * 3, dtype="i4").reshape(SAMPLES, 3) % 5
_WORDS = np.array([["red", "blue"], ["green", "red"], ["black", "red"], ["red", "red"]], object)
_COLOURS = ["red", "green", "blue"]
_LENGTH = {"output_sequence_length": 3}

#: Layers that change images in training alone, with their arguments.
_AUGMENTING: dict[str, dict[str, object]] = {
    "AugMix": {},
    "AutoContrast": {},
    "ContrastLimitedAdaptiveHistogramEqualization": {},
    "CutMix": {},
    "Equalization": {},
    "MixUp": {},
    "RandAugment": {},
    "RandomBrightness": {"factor": 0.2},
    "RandomColorDegeneration": {"factor": 0.2},
    "RandomColorJitter": {},
    "RandomContrast": {"factor": 0.2},
    "RandomElasticTransform": {},
    "RandomErasing": {},
    "RandomFlip": {},
    "RandomGaussianBlur": {},
    "RandomGrayscale": {},
    "RandomHue": {"factor": 0.2},
    "RandomInvert": {},
    "RandomPerspective": {},
    "RandomPosterization": {"factor": 4},
    "RandomRotation": {"factor": 0.2},
    "RandomSaturation": {"factor": 0.2},
    "RandomSharpness": {"factor": 0.2},
    "RandomShear": {},
    "RandomTranslation": {"height_factor": 0.2, "width_factor": 0.2},
    "RandomZoom": {"height_factor": 0.2},
    "Solarization": {},
}


def _image() -> np.ndarray:
    return np.random.default_rng(0).uniform(0, 255, (SAMPLES, 8, 8, 3)).astype("f4")


def _before_a_convolution(layer: Maker) -> Built:
    """Return a net that prepares an image and convolves it."""
    inputs = keras.Input((8, 8, 3))
    outputs = layers.Conv2D(4, 3)(layers.Rescaling(1 / 255)(layer()(inputs)))
    return built(keras.Model(inputs, outputs), _image())


def _embedded(layer: Maker, batch: np.ndarray) -> Built:
    """Return a net that looks up an embedding of what a layer makes of integers or strings."""
    kind = "string" if batch.dtype == object else str(batch.dtype)
    inputs = keras.Input(batch.shape[1:], dtype=kind)
    embedded = layers.Flatten()(layers.Embedding(16, 8)(layer()(inputs)))
    return built(keras.Model(inputs, layers.Dense(4)(embedded)), batch)


def _crossed(layer: Maker) -> Built:
    """Return a net that hashes pairs of two features."""
    inputs = keras.Input((1,), dtype="int32"), keras.Input((1,), dtype="int32")
    crossed = layers.Embedding(8, 8)(layer()(inputs))
    net = keras.Model(list(inputs), layers.Dense(4)(layers.Flatten()(crossed)))
    return built(net, [_COUNTS[:, :1], _COUNTS[:, 1:2]])


def _of_sound(layer: Maker, *shape: int) -> Built:
    """Return a net over the spectrogram of a signal."""
    inputs = keras.Input(shape)
    outputs = layers.Dense(4)(layers.Flatten()(layer()(inputs)))
    return built(keras.Model(inputs, outputs), normal(*shape))


def _with_boxes() -> Built:
    """Return a net that pads the boxes of images."""
    inputs = {
        "images": keras.Input((8, 8, 3)),
        "bounding_boxes": {"boxes": keras.Input((3, 4)), "labels": keras.Input((3,))},
    }
    outputs = layers.MaxNumBoundingBoxes(2, bounding_box_format="xyxy")(inputs)
    boxes = np.random.default_rng(0).uniform(0, 8, (SAMPLES, 3, 4)).astype("f4")
    batch = {"images": _image(), "bounding_boxes": {"boxes": boxes, "labels": normal(3)}}
    return built(keras.Model(inputs, outputs), batch)


CASES = [
    *(case(name, _before_a_convolution, **given) for name, given in _AUGMENTING.items()),
    case("RandomCrop", _before_a_convolution, height=6, width=6),
    case("CenterCrop", around, IMAGE, height=5, width=5),
    case("Normalization", around, IMAGE, mean=[1.0, 2, 3, 4], variance=[1.0, 4, 9, 16]),
    case("Rescaling", around, IMAGE, scale=0.5, offset=1.0),
    case("Resizing", around, IMAGE, height=12, width=12),
    case("CategoryEncoding", alone, _COUNTS, num_tokens=5, output_mode="multi_hot"),
    case("Discretization", _embedded, normal(3), bin_boundaries=[-1.0, 0.0, 1.0]),
    case("HashedCrossing", _crossed, num_bins=8),
    case("Hashing", _embedded, _COUNTS, num_bins=8),
    case("Hashing of strings", _embedded, _WORDS, num_bins=8),
    case("IntegerLookup", _embedded, _COUNTS, vocabulary=[1, 2, 4]),
    case("StringLookup", _embedded, _WORDS, vocabulary=_COLOURS),
    case("TextVectorization", _embedded, _WORDS[:, :1], vocabulary=_COLOURS, **_LENGTH),
    case("MelSpectrogram", _of_sound, 256, fft_length=32, num_mel_bins=8, sampling_rate=1000),
    # The logarithm of small magnitudes enlarges what rounding changes.
    case(
        "STFTSpectrogram",
        _of_sound,
        256,
        1,
        **{"frame_length": 32, "frame_step": 16, "options": {"min_sqnr_db": 10.0}},
    ),
    made("MaxNumBoundingBoxes", _with_boxes),
]
