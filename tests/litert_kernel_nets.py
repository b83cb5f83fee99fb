"""Small Keras nets of many op types as `.tflite` files, in float and INT8."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import keras
import numpy as np
from keras import layers
from keras import ops as kops
from litert_nets import as_litert

from neural_mp.adaptors.litert.graph.program import Program, get_sizes
from neural_mp.adaptors.litert.model import Recipe, Structure
from neural_mp.adaptors.litert.quantizer import (
    STATIC,
    Step,
    list_supported_types,
    make_recipe,
    quantize_tree,
)
from neural_mp.adaptors.litert.runtime import Runner


def _squeeze_excite(x, squeezed: str, gate: str):
    channels = x.shape[-1]
    y = layers.GlobalAveragePooling2D(keepdims=True)(x)
    y = layers.Conv2D(8, 1, activation=squeezed)(y)
    return x * layers.Conv2D(channels, 1, activation=gate)(y)


def hard_swish_net() -> keras.Model:
    """A net like MobileNetV3, whose HARD_SWISH has no INT8 kernel in XNNPACK."""
    image = keras.Input((32, 32, 3))
    x = kops.hard_silu(layers.Conv2D(16, 3, 2, padding="same")(image))
    for width, stride in ((24, 1), (48, 2)):
        y = kops.hard_silu(layers.Conv2D(width, 1)(x))
        y = kops.hard_silu(layers.DepthwiseConv2D(3, stride, padding="same")(y))
        y = layers.Conv2D(16, 1)(_squeeze_excite(y, "relu", "hard_sigmoid"))
        x = x + y if stride == 1 else y
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(image, layers.Dense(10, activation="softmax")(x))


def silu_net() -> keras.Model:
    """A net like EfficientNet: LOGISTIC and MUL of a SiLU are one kernel in INT8."""
    image = keras.Input((32, 32, 3))
    x = layers.Conv2D(16, 3, 2, padding="same", activation="silu")(image)
    y = layers.Conv2D(32, 1, activation="silu")(x)
    y = layers.DepthwiseConv2D(3, padding="same", activation="silu")(y)
    x = x + layers.Conv2D(16, 1)(_squeeze_excite(y, "silu", "sigmoid"))
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling2D()(x)))


def attention_net() -> keras.Model:
    """A transformer block on patches."""
    image = keras.Input((32, 32, 3))
    x = layers.Reshape((16, 32))(layers.Conv2D(32, 8, 8)(image))
    y = layers.LayerNormalization()(x)
    x = x + layers.MultiHeadAttention(2, 16)(y, y)
    y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
    x = x + layers.Dense(32)(y)
    return keras.Model(image, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


def recurrent_net(steps: int = 8, *, unroll: bool = False) -> keras.Model:
    """Two LSTM layers: loops, or unrolled."""
    sequence = keras.Input((steps, 16))
    x = layers.LSTM(16, return_sequences=True, unroll=unroll)(sequence)
    return keras.Model(sequence, layers.Dense(5)(layers.LSTM(16, unroll=unroll)(x)))


def detector_net() -> keras.Model:
    """A neck with two heads, whose results LiteRT's own kernels reshape and join."""
    image, features = keras.Input((32, 32, 3)), []
    x = image
    for channels in (8, 16):
        x = layers.Conv2D(channels, 3, 2, padding="same", activation="swish")(x)
        features.append(x)
    features[0] = layers.Concatenate()([features[0], layers.UpSampling2D(2)(x)])
    boxes = [layers.Reshape((-1, 4))(layers.Conv2D(12, 1)(x)) for x in features]
    scores = [layers.Reshape((-1, 5))(layers.Conv2D(15, 1)(x)) for x in features]
    joined = [layers.Concatenate(axis=1)(parts) for parts in (boxes, scores)]
    return keras.Model(image, [joined[0], layers.Activation("sigmoid")(joined[1])])


NETS: dict[str, Callable[[], keras.Model]] = {
    "hard_swish": hard_swish_net,
    "silu": silu_net,
    "attention": attention_net,
    "loops": recurrent_net,
    "unrolled": lambda: recurrent_net(unroll=True),
    "detector": detector_net,
}


def fix_batch(net: keras.Model) -> keras.Model:
    """Return a net for single samples."""
    sample = keras.Input(batch_shape=(1, *net.input_shape[1:]))
    return keras.Model(sample, net(sample))


@cache
def make_float_file(name: str, *, frees_batch: bool = False) -> bytes:
    """Return a net of `NETS` in float. Loops need a fixed batch."""
    keras.utils.set_random_seed(0)
    net = NETS[name]()
    return as_litert(net if frees_batch else fix_batch(net))


@cache
def make_int8_file(name: str) -> bytes:
    """Return a net of `NETS` with all ops in INT8 that the quantizer has."""
    program = Program.parse(make_float_file(name))
    structure = Structure(program)
    types = list_supported_types(STATIC) - {"SPLIT"}  # a result that nobody reads stays float
    names = [op for op in structure.ops if structure.get_type(op) in types]
    tensors = sorted({index for op in names for index in structure.iterate_float_tensors(op)})
    inputs = [int(index) for index in program.main.inputs]
    arrays = Runner(program.content, inputs, tensors, keeps_tensors=True)(draw_feeds(program))
    ranges = {
        program.tensor_name(index): (float(array.min()), float(array.max()))
        for index, array in zip(tensors, arrays, strict=True)
    }
    steps = [Step(structure.get_scope(op), STATIC) for op in names]
    recipe = Recipe(make_recipe(steps), ranges)
    return Program.wrap(quantize_tree(program.tree, recipe.entries, recipe.statistics)).content


def draw_feeds(program: Program, batch: int = 1) -> list[np.ndarray]:
    """Return random float inputs of the main subgraph."""
    draw = np.random.default_rng(0)
    shapes = [get_sizes(program.main.tensors[index])[1:] for index in program.main.inputs]
    return [draw.normal(size=(batch, *shape)).astype(np.float32) for shape in shapes]
