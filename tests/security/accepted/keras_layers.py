"""One small Keras model around each layer, and around each option that a configuration names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
from keras import layers

#: Name of a model → the function that builds the model.
MODELS: dict[str, Callable[[], Any]] = {}

VECTOR, SEQUENCE, IMAGE, VOLUME, COLOURS = (10,), (6, 8), (8, 8, 4), (6, 6, 6, 2), (16, 16, 3)


def _around(shape: tuple[int, ...], make: Callable[[], Any], dtype: str | None = None) -> Any:
    inputs = keras.Input(shape, dtype=dtype)
    outputs = make()(inputs)
    if isinstance(outputs, (list, tuple, dict)) or "float" not in str(outputs.dtype):
        return keras.Model(inputs, outputs)
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(outputs)))


def _of(name: str, shape: tuple[int, ...], title: str = "", **options: Any) -> None:
    if hasattr(layers, name):
        MODELS[title or name] = lambda: _around(shape, lambda: getattr(layers, name)(**options))


def _merging(name: str, shape: tuple[int, ...] = SEQUENCE, **options: Any) -> None:
    def build() -> Any:
        inputs = keras.Input(shape)
        branches = [layers.Dense(shape[-1])(inputs), layers.Dense(shape[-1])(inputs)]
        return keras.Model(inputs, getattr(layers, name)(**options)(branches))

    MODELS[name] = build


# Dense layers, convolutions and pooling.
_of("Dense", VECTOR, units=4, activation="relu")
_of("Dense", SEQUENCE, "Dense_sequence", units=4, use_bias=False)
_of("EinsumDense", SEQUENCE, equation="abc,cd->abd", output_shape=(6, 4))
for _axes, _shape in ((1, SEQUENCE), (2, IMAGE), (3, VOLUME)):
    _of(f"Conv{_axes}D", _shape, filters=4, kernel_size=3)
    _of(f"Conv{_axes}D", _shape, f"Conv{_axes}D_strided", filters=4, kernel_size=2, strides=2)
    _of(f"Conv{_axes}DTranspose", _shape, filters=4, kernel_size=3)
    _of(f"ZeroPadding{_axes}D", _shape, padding=1)
    _of(f"Cropping{_axes}D", _shape, cropping=1)
    _of(f"UpSampling{_axes}D", _shape, size=2)
    _of(f"SpatialDropout{_axes}D", _shape, rate=0.2)
    for _kind in ("Max", "Average"):
        _of(f"{_kind}Pooling{_axes}D", _shape, pool_size=2)
        _of(f"Global{_kind}Pooling{_axes}D", _shape)
        _of(f"Adaptive{_kind}Pooling{_axes}D", _shape, output_size=2)
for _axes, _shape in ((1, SEQUENCE), (2, IMAGE)):
    _of(f"SeparableConv{_axes}D", _shape, filters=4, kernel_size=3)
    _of(f"DepthwiseConv{_axes}D", _shape, kernel_size=3)
_of("Conv1D", SEQUENCE, "Conv1D_causal", filters=4, kernel_size=3, padding="causal")
_of("Conv2D", IMAGE, "Conv2D_groups", filters=4, kernel_size=3, groups=2)
_of("Conv2D", IMAGE, "Conv2D_dilated", filters=4, kernel_size=3, dilation_rate=2)
_of("UpSampling2D", IMAGE, "UpSampling2D_bilinear", size=2, interpolation="bilinear")

# Norms, activations and regularization.
for _name in ("BatchNormalization", "LayerNormalization", "UnitNormalization", "RMSNormalization"):
    _of(_name, SEQUENCE)
_of("GroupNormalization", IMAGE, groups=2)
_of("SpectralNormalization", VECTOR, layer=layers.Dense(3))
for _name in ("ELU", "LeakyReLU", "PReLU", "ReLU", "Softmax", "Identity", "Flatten", "Masking"):
    _of(_name, SEQUENCE)
_of("ReLU", SEQUENCE, "ReLU_6", max_value=6.0, negative_slope=0.1, threshold=0.1)
for _name in ("AlphaDropout", "Dropout", "GaussianDropout"):
    _of(_name, SEQUENCE, rate=0.3)
_of("Dropout", SEQUENCE, "Dropout_seeded", rate=0.3, seed=1, noise_shape=(None, 1, 8))
_of("GaussianNoise", SEQUENCE, stddev=0.1)
_of("ActivityRegularization", SEQUENCE, l1=0.1)
for _name in (
    "celu",
    "elu",
    "exponential",
    "gelu",
    "hard_shrink",
    "hard_sigmoid",
    "hard_silu",
    "hard_tanh",
    "leaky_relu",
    "linear",
    "log_sigmoid",
    "log_softmax",
    "mish",
    "relu",
    "relu6",
    "selu",
    "sigmoid",
    "silu",
    "soft_shrink",
    "softmax",
    "softplus",
    "softsign",
    "sparse_plus",
    "sparse_sigmoid",
    "sparsemax",
    "squareplus",
    "tanh",
    "tanh_shrink",
):
    if hasattr(keras.activations, _name):
        _of("Activation", VECTOR, f"activation_{_name}", activation=_name)

# Shapes.
_of("Permute", SEQUENCE, dims=(2, 1))
_of("RepeatVector", VECTOR, n=3)
_of("Reshape", SEQUENCE, target_shape=(4, -1))

# Layers of several inputs.
for _name in ("Add", "Average", "Concatenate", "Maximum", "Minimum", "Multiply", "Subtract"):
    _merging(_name)
_merging("Dot", axes=2)
_merging("AdditiveAttention")
_merging("Attention", use_scale=True)

# Recurrent layers.
for _name in ("SimpleRNN", "GRU", "LSTM"):
    _of(_name, SEQUENCE, units=4)
    _of(_name, SEQUENCE, f"{_name}_sequences", units=4, return_sequences=True, go_backwards=True)
    _of(_name, SEQUENCE, f"{_name}_dropout", units=4, dropout=0.2, recurrent_dropout=0.2)
_of("GRU", SEQUENCE, "GRU_classic", units=4, reset_after=False)
_of("LSTM", SEQUENCE, "LSTM_unrolled", units=4, unroll=True)
_of("ConvLSTM1D", (3, 8, 2), filters=2, kernel_size=3)
_of("ConvLSTM2D", (3, 8, 8, 2), filters=2, kernel_size=3)
_of("ConvLSTM3D", (2, 5, 5, 5, 2), filters=2, kernel_size=2)
for _name in ("SimpleRNN", "GRU", "LSTM"):
    MODELS[f"RNN_{_name}Cell"] = lambda n=_name: _around(
        SEQUENCE, lambda: layers.RNN(getattr(layers, f"{n}Cell")(4))
    )
MODELS["StackedRNNCells"] = lambda: _around(
    SEQUENCE,
    lambda: layers.RNN(layers.StackedRNNCells([layers.LSTMCell(3), layers.GRUCell(2)])),
)
MODELS["Bidirectional"] = lambda: _around(
    SEQUENCE, lambda: layers.Bidirectional(layers.LSTM(3), merge_mode="sum")
)
MODELS["TimeDistributed"] = lambda: _around(
    SEQUENCE, lambda: layers.TimeDistributed(layers.Dense(3))
)


def _alike(names: tuple[str, ...], options: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return equal options for several layers."""
    return {name: {**options} for name in names}


# Images: most augment in training only.
for _name in (
    "AugMix",
    "AutoContrast",
    "ContrastLimitedAdaptiveHistogramEqualization",
    "CutMix",
    "Equalization",
    "MixUp",
    "RandAugment",
    "RandomColorJitter",
    "RandomElasticTransform",
    "RandomErasing",
    "RandomFlip",
    "RandomGaussianBlur",
    "RandomGrayscale",
    "RandomInvert",
    "RandomPerspective",
    "RandomShear",
    "Solarization",
):
    _of(_name, COLOURS)
for _name in (
    "RandomBrightness",
    "RandomColorDegeneration",
    "RandomContrast",
    "RandomHue",
    "RandomRotation",
    "RandomSaturation",
    "RandomSharpness",
):
    _of(_name, COLOURS, factor=0.2)
_of("RandomPosterization", COLOURS, factor=4)
_of("RandomTranslation", COLOURS, height_factor=0.2, width_factor=0.2)
_of("RandomZoom", COLOURS, height_factor=0.2)
_of("RandomCrop", COLOURS, height=16, width=16)
_of("CenterCrop", COLOURS, height=6, width=6)
_of("Resizing", COLOURS, height=6, width=6)
_of("Rescaling", COLOURS, scale=0.5)
_of("Normalization", COLOURS, mean=[0.0, 1, 2], variance=[1.0, 2, 3])
_of("MelSpectrogram", (256,), fft_length=32, num_mel_bins=8, sampling_rate=1000)
_of("STFTSpectrogram", (256, 1), frame_length=32, frame_step=16)
