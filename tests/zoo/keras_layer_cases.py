"""Cases of Keras layers without recurrence: one or more per class."""

from __future__ import annotations

import tempfile

import keras
import numpy as np
from keras import layers
from zoo.harness import Case
from zoo.keras_models import (
    IMAGE,
    SAMPLES,
    SEQUENCE,
    VOLUME,
    alone,
    around,
    built,
    case,
    made,
    merging,
    normal,
)


class _Wrapped(layers.Wrapper):
    """Wrapper that doubles the result of a layer."""

    def call(self, inputs):
        return 2 * self.layer(inputs)


class _Own(layers.Layer):
    """User-defined layer."""

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], 8))

    def call(self, inputs):
        return keras.ops.relu(inputs @ self.kernel)


def _on_itself(layer):
    return lambda inputs: layer(inputs, inputs)


def _with_input_layer():
    net = keras.Sequential([layers.InputLayer((8,)), layers.Dense(4)])
    return built(net, normal(8))


def _reversed_embedding():
    """An embedding whose table is the last product, too, as language models have."""
    embedding = layers.ReversibleEmbedding(16, 8)
    inputs = keras.Input((6,), dtype="int32")
    net = keras.Model(inputs, embedding(layers.Dense(8)(embedding(inputs)), reverse=True))
    return built(net, np.arange(SAMPLES * 6, dtype="i4").reshape(SAMPLES, 6) % 16)


def _of_saved_model():
    with tempfile.TemporaryDirectory() as folder:
        inner = keras.Sequential([keras.Input((8,)), layers.Dense(8, activation="relu")])
        inner.export(folder, verbose=False)
        inputs = keras.Input((8,))
        served = layers.TFSMLayer(folder, call_endpoint="serve")(inputs)
        return built(keras.Model(inputs, layers.Dense(4)(served)), normal(8))


_SHAPES = {1: SEQUENCE, 2: IMAGE, 3: VOLUME}


def _in_every_dimension(name: str, dimensions: str, **arguments: object) -> list[Case]:
    return [
        case(name.replace("ND", f"{size}D"), around, _SHAPES[int(size)], **arguments)
        for size in dimensions
    ]


_ACTIVATIONS = [
    case("Activation gelu", around, SEQUENCE, activation="gelu"),
    case("Activation swish", around, IMAGE, activation="swish"),
    case("Activation hard_swish", around, IMAGE, activation="hard_swish"),
    case("Activation mish", around, SEQUENCE, activation="mish"),
    case("Activation softplus", around, SEQUENCE, activation="softplus"),
    case("Activation tanh", around, SEQUENCE, activation="tanh"),
    case("ELU", around, IMAGE),
    case("LeakyReLU", around, IMAGE),
    case("PReLU", around, IMAGE, shared_axes=[1, 2]),
    case("ReLU", around, IMAGE),
    case("ReLU clipped at 6", around, IMAGE, max_value=6.0),
    case("ReLU with threshold", around, IMAGE, threshold=0.1, negative_slope=0.2),
    case("Softmax", around, SEQUENCE),
    case("Softmax in mixed_bfloat16", around, SEQUENCE, dtype="mixed_bfloat16"),
]

_CONVOLUTIONS = [
    *_in_every_dimension("ConvND", "123", filters=8, kernel_size=3),
    case("Conv1D causal", around, SEQUENCE, filters=8, kernel_size=3, padding="causal"),
    case("Conv1D dilated", around, SEQUENCE, filters=8, kernel_size=2, dilation_rate=2),
    case("Conv2D in groups", around, IMAGE, filters=8, kernel_size=3, groups=2),
    case("Conv2D with strides", around, IMAGE, filters=8, kernel_size=3, strides=2),
    case(
        "Conv2D with activation",
        around,
        IMAGE,
        **{"filters": 8, "kernel_size": 3, "activation": "relu", "padding": "same"},
    ),
    *_in_every_dimension("ConvNDTranspose", "123", filters=8, kernel_size=3, strides=2),
    *_in_every_dimension("DepthwiseConvND", "12", kernel_size=3),
    case("DepthwiseConv2D with multiplier", around, IMAGE, kernel_size=3, depth_multiplier=2),
    *_in_every_dimension("SeparableConvND", "12", filters=8, kernel_size=3),
]

_POOLING = [
    *_in_every_dimension("MaxPoolingND", "123"),
    *_in_every_dimension("AveragePoolingND", "123", pool_size=2),
    *_in_every_dimension("GlobalMaxPoolingND", "123"),
    *_in_every_dimension("GlobalAveragePoolingND", "123"),
    *_in_every_dimension("AdaptiveMaxPoolingND", "123", output_size=2),
    *_in_every_dimension("AdaptiveAveragePoolingND", "123", output_size=2),
]

_SHAPING = [
    *_in_every_dimension("CroppingND", "123", cropping=1),
    *_in_every_dimension("UpSamplingND", "123", size=2),
    case("UpSampling2D bilinear", around, IMAGE, interpolation="bilinear"),
    *_in_every_dimension("ZeroPaddingND", "123", padding=1),
    case("Flatten", around, IMAGE),
    case("Permute", around, IMAGE, dims=(3, 1, 2)),
    case("RepeatVector", around, (8,), n=3),
    case("Reshape", around, IMAGE, target_shape=(16, 16)),
    case("Identity", around, IMAGE),
    made("InputLayer", _with_input_layer),
]

_MERGING = [
    *(case(name, merging, SEQUENCE) for name in ("Add", "Average", "Concatenate", "Maximum")),
    *(case(name, merging, SEQUENCE) for name in ("Minimum", "Multiply", "Subtract")),
    case("Concatenate of three", merging, SEQUENCE, 3),
    case("Dot", merging, SEQUENCE, axes=2),
    case("Dot normalized", merging, SEQUENCE, axes=2, normalize=True),
]

_NORMALIZATIONS = [
    case("BatchNormalization", around, IMAGE),
    case("GroupNormalization", around, IMAGE, groups=2),
    case("LayerNormalization", around, SEQUENCE),
    case("LayerNormalization in mixed_float16", around, SEQUENCE, dtype="mixed_float16"),
    case("RMSNormalization", around, SEQUENCE),
    case("UnitNormalization", around, SEQUENCE),
    made(
        "SpectralNormalization",
        around,
        lambda: layers.SpectralNormalization(layers.Conv2D(8, 3)),
        IMAGE,
    ),
]

_ATTENTION = [
    case("AdditiveAttention", merging, SEQUENCE),
    case("Attention", merging, SEQUENCE, use_scale=True),
    made(
        "MultiHeadAttention",
        around,
        lambda: _on_itself(layers.MultiHeadAttention(2, 4)),
        SEQUENCE,
    ),
    made(
        "GroupQueryAttention",
        around,
        lambda: _on_itself(layers.GroupQueryAttention(4, 4, 2)),
        SEQUENCE,
    ),
]

_DENSE = [
    case("Dense", around, (8,), units=8),
    case("Dense on sequences", around, SEQUENCE, units=8, activation="relu"),
    case("Dense in mixed_float16", around, (8,), units=8, dtype="mixed_float16"),
    case("Dense in mixed_bfloat16", around, (8,), units=8, dtype="mixed_bfloat16"),
    case("Dense without bias", around, (8,), units=8, use_bias=False),
    case("EinsumDense", around, SEQUENCE, equation="abc,cd->abd", output_shape=(6, 8)),
    case(
        "EinsumDense with two axes",
        around,
        SEQUENCE,
        **{"equation": "abc,cde->abde", "output_shape": (6, 2, 4), "bias_axes": "de"},
    ),
    case("Embedding", alone, np.arange(12).reshape(2, 6), input_dim=16, output_dim=8),
    made("ReversibleEmbedding", _reversed_embedding),
    made("Lambda", around, lambda: layers.Lambda(lambda x: x * 2 + 1), IMAGE),
    case("Masking", around, SEQUENCE),
    made("Wrapper", around, lambda: _Wrapped(layers.Dense(8), name="doubled"), (8,)),
    made("Layer", around, lambda: _Own(name="own"), (8,)),
    made("TFSMLayer", _of_saved_model),
    made(
        "Pipeline",
        around,
        lambda: layers.Pipeline([layers.Rescaling(0.5), layers.Dense(8)]),
        (8,),
    ),
]

_DROPPING = [
    *(case(name, around, IMAGE, rate=0.5) for name in ("AlphaDropout", "Dropout")),
    case("GaussianDropout", around, IMAGE, rate=0.5),
    case("GaussianNoise", around, IMAGE, stddev=0.5),
    case("ActivityRegularization", around, IMAGE, l2=0.1),
    *_in_every_dimension("SpatialDropoutND", "123", rate=0.5),
]

CASES = [
    *_ACTIVATIONS,
    *_CONVOLUTIONS,
    *_POOLING,
    *_SHAPING,
    *_MERGING,
    *_NORMALIZATIONS,
    *_ATTENTION,
    *_DENSE,
    *_DROPPING,
]
