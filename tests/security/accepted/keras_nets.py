"""Keras models of several layers: text, attention, options of training, precisions, structures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from accepted.cases import WORDS
from keras import layers

#: Name of a model → the function that builds the model.
MODELS: dict[str, Callable[[], Any]] = {}


def _model(build: Callable[[], Any]) -> Callable[[], Any]:
    MODELS[build.__name__.lstrip("_")] = build
    return build


def _chain(shape: tuple[int | None, ...], *stack: Any, dtype: str | None = None) -> Any:
    inputs = outputs = keras.Input(shape, dtype=dtype)
    for layer in stack:
        outputs = layer(outputs)
    return keras.Model(inputs, outputs)


def _adapted(layer: Any, data: Any) -> Any:
    layer.adapt(data)
    return layer


_TEXTS = tf.constant(["red green", "blue red black", "green"])

# Text and categories.
_LOOKUPS: dict[str, Callable[[], Any]] = {
    "StringLookup": lambda: layers.StringLookup(vocabulary=WORDS),
    "StringLookup_adapted": lambda: _adapted(layers.StringLookup(), tf.constant(WORDS)),
    "StringLookup_oov": lambda: layers.StringLookup(vocabulary=WORDS[:2], num_oov_indices=3),
    "StringLookup_mask": lambda: layers.StringLookup(vocabulary=WORDS, mask_token=""),
}
for _name, _lookup in _LOOKUPS.items():
    MODELS[_name] = lambda lookup=_lookup: _chain(
        (2,), lookup(), layers.Embedding(9, 3), layers.Dense(2), dtype="string"
    )
for _mode in ("one_hot", "multi_hot", "count"):
    MODELS[f"StringLookup_{_mode}"] = lambda mode=_mode: _chain(
        (2,),
        layers.StringLookup(vocabulary=WORDS, output_mode=mode),
        layers.Dense(2),
        dtype="string",
    )
    MODELS[f"TextVectorization_{_mode}"] = lambda mode=_mode: _chain(
        (),
        layers.TextVectorization(vocabulary=WORDS, output_mode=mode.replace("one", "multi")),
        layers.Dense(2),
        dtype="string",
    )
    MODELS[f"CategoryEncoding_{_mode}"] = lambda mode=_mode: _chain(
        (1,) if mode == "one_hot" else (3,),
        layers.CategoryEncoding(num_tokens=5, output_mode=mode),
        layers.Dense(2),
        dtype="int32",
    )


@_model
def _IntegerLookup() -> Any:  # noqa: N802 (the name of the layer)
    return _chain(
        (2,), layers.IntegerLookup(vocabulary=[1, 3]), layers.Embedding(4, 3), dtype="int64"
    )


@_model
def _StringLookup_inverse() -> Any:  # noqa: N802
    lookup = layers.StringLookup(vocabulary=WORDS, invert=True)
    return _chain((2,), lookup, dtype="int64")


@_model
def _TextVectorization() -> Any:  # noqa: N802
    vectorizer = layers.TextVectorization(vocabulary=WORDS, output_sequence_length=4)
    net = (layers.Embedding(6, 3), layers.GlobalAveragePooling1D(), layers.Dense(2))
    return _chain((), vectorizer, *net, dtype="string")


@_model
def _TextVectorization_adapted() -> Any:  # noqa: N802
    vectorizer = _adapted(layers.TextVectorization(output_sequence_length=4, ngrams=2), _TEXTS)
    return _chain((1,), vectorizer, layers.Embedding(20, 3), layers.LSTM(3), dtype="string")


@_model
def _TextVectorization_tf_idf() -> Any:  # noqa: N802
    vectorizer = _adapted(layers.TextVectorization(output_mode="tf_idf"), _TEXTS)
    return _chain((), vectorizer, layers.Dense(2), dtype="string")


@_model
def _Hashing() -> Any:  # noqa: N802
    return _chain((2,), layers.Hashing(num_bins=4), layers.Embedding(4, 2), dtype="string")


@_model
def _Hashing_salted() -> Any:  # noqa: N802
    return _chain((2,), layers.Hashing(num_bins=4, salt=[1, 2], mask_value=""), dtype="string")


@_model
def _HashedCrossing() -> Any:  # noqa: N802
    inputs = [keras.Input((1,), dtype="string"), keras.Input((1,), dtype="string")]
    return keras.Model(inputs, layers.HashedCrossing(num_bins=5)(tuple(inputs)))


@_model
def _Discretization() -> Any:  # noqa: N802
    return _chain((3,), layers.Discretization(bin_boundaries=[0.0, 1.0]), layers.Embedding(3, 2))


@_model
def _Normalization_adapted() -> Any:  # noqa: N802
    data = np.random.default_rng(0).normal(size=(20, 3)).astype("f4")
    return _chain((3,), _adapted(layers.Normalization(), data), layers.Dense(2))


@_model
def _features() -> Any:
    space = keras.utils.FeatureSpace(
        {"size": "float_normalized", "colour": "string_categorical", "kind": "integer_categorical"},
        output_mode="concat",
    )
    data = {"size": [1.0, 2.0, 3.0], "colour": list(WORDS[:3]), "kind": [1, 2, 1]}
    space.adapt(tf.data.Dataset.from_tensor_slices(data))
    encoded = space.get_encoded_features()
    return keras.Model(space.get_inputs(), layers.Dense(2)(encoded))


# Attention, masks and embeddings.
@_model
def _MultiHeadAttention() -> Any:  # noqa: N802
    inputs = keras.Input((5, 8))
    return keras.Model(inputs, layers.MultiHeadAttention(2, 4)(inputs, inputs))


@_model
def _GroupQueryAttention() -> Any:  # noqa: N802
    inputs = keras.Input((5, 8))
    return keras.Model(inputs, layers.GroupQueryAttention(4, 4, 2)(inputs, inputs))


@_model
def _transformer() -> Any:
    inputs = keras.Input((None,), dtype="int32")
    x = layers.Embedding(10, 8)(inputs)
    x = layers.LayerNormalization()(x + layers.MultiHeadAttention(2, 4)(x, x))
    x = layers.LayerNormalization()(x + layers.Dense(8)(layers.Dense(16, activation="gelu")(x)))
    return keras.Model(inputs, layers.Dense(2)(layers.GlobalAveragePooling1D()(x)))


@_model
def _masked() -> Any:
    net = (layers.Embedding(10, 4, mask_zero=True), layers.Bidirectional(layers.GRU(3)))
    return _chain((6,), *net, layers.Dense(1), dtype="int32")


@_model
def _Embedding() -> Any:  # noqa: N802
    return _chain((5,), layers.Embedding(10, 4), dtype="int32")


@_model
def _ReversibleEmbedding() -> Any:  # noqa: N802
    return _chain((5,), layers.ReversibleEmbedding(10, 4), dtype="int32")


# Structures.
@_model
def _sequential() -> Any:
    return keras.Sequential([keras.Input((8,)), layers.Dense(4), layers.Dense(2)])


@_model
def _nested() -> Any:
    inner = keras.Sequential([layers.Dense(4, activation="gelu"), layers.Dense(2)])
    return _chain((8,), inner, keras.Sequential([layers.Dense(3), layers.ReLU()]))


@_model
def _shared() -> Any:
    layer, inputs = layers.Dense(8), keras.Input((8,))
    return keras.Model(inputs, layer(layer(inputs)))


@_model
def _several() -> Any:
    inputs = {"left": keras.Input((4,), name="left"), "right": keras.Input((4,), name="right")}
    joined = layers.Concatenate()([inputs["left"], inputs["right"]])
    return keras.Model(inputs, {"sum": layers.Dense(2)(joined), "same": inputs["left"] * 2})


@_model
def _operations() -> Any:
    inputs = keras.Input((5, 8))
    scores = keras.ops.matmul(inputs, keras.ops.transpose(inputs, (0, 2, 1)))
    return keras.Model(inputs, keras.ops.softmax(scores * 0.5 + 1)[:, :2])


@_model
def _operations_of_shapes() -> Any:
    inputs = keras.Input((4, 6))
    parts = keras.ops.split(keras.ops.reshape(inputs, (-1, 24)), 2, axis=-1)
    return keras.Model(inputs, keras.ops.stack(parts, 1) - keras.ops.mean(inputs))


@_model
def _lambda_of_keras() -> Any:
    return _chain((4,), layers.Lambda(keras.ops.relu))


@_model
def _random_at_inference() -> Any:
    inputs = keras.Input((8,))
    return keras.Model(inputs, layers.Dropout(0.5)(layers.Dense(4)(inputs), training=True))


@_model
def _open_sizes() -> Any:
    return _chain((None, None, 3), layers.Conv2D(4, 3), layers.GlobalAveragePooling2D())


@_model
def _augmented() -> Any:
    steps = (layers.RandomFlip(), layers.RandomRotation(0.1), layers.RandomContrast(0.1))
    return _chain((16, 16, 3), *steps, layers.Resizing(8, 8), layers.Conv2D(2, 3))


# Precisions.
for _policy in ("float64", "float16", "bfloat16", "mixed_float16", "mixed_bfloat16"):
    MODELS[f"policy_{_policy}"] = lambda policy=_policy: _chain(
        (8,), layers.Dense(4, dtype=policy), layers.Dense(2, dtype=keras.DTypePolicy(policy))
    )


def _quantized(mode: str) -> Any:
    net = _chain((8,), layers.Dense(4), layers.Dense(2))
    net.quantize(mode)
    return net


for _mode in ("int8", "int4", "float8"):
    MODELS[f"quantized_{_mode}"] = lambda mode=_mode: _quantized(mode)


@_model
def _lora() -> Any:
    net = _chain((8,), layers.Dense(4))
    net.layers[1].enable_lora(2)
    return net


# What configurations name.
for _name in (
    "GlorotNormal",
    "GlorotUniform",
    "HeNormal",
    "HeUniform",
    "LecunNormal",
    "LecunUniform",
    "Ones",
    "Orthogonal",
    "RandomNormal",
    "RandomUniform",
    "TruncatedNormal",
    "Zeros",
    "VarianceScaling",
    "Identity",
    "Constant",
):
    MODELS[f"initializer_{_name}"] = lambda name=_name: _chain(
        (4,), layers.Dense(4, kernel_initializer=getattr(keras.initializers, name)())
    )
for _name in ("L1", "L2", "L1L2", "OrthogonalRegularizer"):
    MODELS[f"regularizer_{_name}"] = lambda name=_name: _chain(
        (4,), layers.Dense(4, kernel_regularizer=getattr(keras.regularizers, name)())
    )
for _name in ("MaxNorm", "MinMaxNorm", "NonNeg", "UnitNorm"):
    MODELS[f"constraint_{_name}"] = lambda name=_name: _chain(
        (4,), layers.Dense(4, kernel_constraint=getattr(keras.constraints, name)())
    )


def _trained(optimizer: Any = "adam", loss: Any = "mse", metrics: Any = None) -> Any:
    net = _chain((4,), layers.Dense(8, activation="relu"), layers.Dense(2, activation="softmax"))
    net.compile(optimizer, loss, metrics=metrics)
    draw = np.random.default_rng(0)
    values, labels = draw.random((8, 4)), np.eye(2)[draw.integers(0, 2, 8)]
    net.fit(values, labels, epochs=1, verbose=0)
    return net


for _name in (
    "Adadelta",
    "Adafactor",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "Lamb",
    "Lion",
    "Muon",
    "Nadam",
    "RMSprop",
    "SGD",
):
    if hasattr(keras.optimizers, _name):
        MODELS[f"optimizer_{_name}"] = lambda name=_name: _trained(
            getattr(keras.optimizers, name)()
        )
for _name, _schedule in {
    "CosineDecay": (1e-3, 100),
    "ExponentialDecay": (1e-3, 100, 0.9),
    "PiecewiseConstantDecay": ([10, 20], [1e-2, 1e-3, 1e-4]),
    "PolynomialDecay": (1e-3, 100),
}.items():
    MODELS[f"schedule_{_name}"] = lambda name=_name, given=_schedule: _trained(
        keras.optimizers.SGD(getattr(keras.optimizers.schedules, name)(*given))
    )
for _name in (
    "BinaryCrossentropy",
    "BinaryFocalCrossentropy",
    "CategoricalCrossentropy",
    "Dice",
    "Hinge",
    "CategoricalFocalCrossentropy",
    "CosineSimilarity",
    "Huber",
    "KLDivergence",
    "LogCosh",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Poisson",
    "SquaredHinge",
    "Tversky",
):
    MODELS[f"loss_{_name}"] = lambda name=_name: _trained(loss=getattr(keras.losses, name)())
for _name in (
    "AUC",
    "BinaryAccuracy",
    "CategoricalAccuracy",
    "F1Score",
    "FalsePositives",
    "Precision",
    "R2Score",
    "Recall",
    "RootMeanSquaredError",
    "TopKCategoricalAccuracy",
    "MeanSquaredError",
):
    MODELS[f"metric_{_name}"] = lambda name=_name: _trained(
        metrics=[getattr(keras.metrics, name)()]
    )

#: Nets of `keras.applications` with random weights.
APPLICATIONS: dict[str, Callable[[], Any]] = {
    name: lambda name=name, options=options: getattr(keras.applications, name)(
        weights=None, classes=4, **{"input_shape": (32, 32, 3), **options}
    )
    for name, options in {
        "MobileNet": {"alpha": 0.25},
        "MobileNetV2": {"alpha": 0.35},
        "MobileNetV3Small": {},
        "EfficientNetB0": {},
        "EfficientNetV2B0": {},
        "ResNet50": {},
        "DenseNet121": {},
        "ConvNeXtTiny": {},
        "Xception": {"input_shape": (71, 71, 3)},
    }.items()
}
