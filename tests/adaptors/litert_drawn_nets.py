"""Keras nets drawn by a seed from families of constructs, as LiteRT files with data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import layers, ops
from litert_nets import as_litert, fix_batch

SAMPLES = 4
#: Sizes of an image and of a sequence.
IMAGE, SEQUENCE = (8, 8, 4), (6, 8)
#: Words of an embedding.
_WORDS = 16
_MAX_DRAWS = 50
Tensor = Any


@dataclass(frozen=True)
class Draw:
    """Random choices of one net."""

    random: np.random.Generator

    def pick(self, *values: Any) -> Any:
        """Return one of some values."""
        return values[int(self.random.integers(len(values)))]

    def happens(self, probability: float = 0.5) -> bool:
        """Whether an event with a probability happens."""
        return bool(self.random.random() < probability)


Block = Callable[[Draw, Tensor], "Tensor | tuple[Tensor, Tensor]"]
_ACTIVATIONS = (None, "relu", "relu6", "silu", "tanh", "sigmoid", "hard_silu", "gelu", "elu")


def _convolve(draw: Draw, x: Tensor, filters: int | None = None) -> Tensor:
    kernel, activation = draw.pick(1, 3), draw.pick(*_ACTIVATIONS)
    kind = layers.Conv2D if len(x.shape) == 4 else layers.Conv1D
    return kind(filters or x.shape[-1], kernel, padding="same", activation=activation)(x)


def residual(draw: Draw, x: Tensor) -> Tensor:
    """A sum of a layer and its input, maybe through a norm."""
    inner = _convolve(draw, x)
    if draw.happens():
        inner = layers.BatchNormalization()(inner)
    total = layers.Add()([inner, x])
    return layers.ReLU()(total) if draw.happens() else total


def concatenation(draw: Draw, x: Tensor) -> Tensor:
    """Branches of several scales joined on any axis, maybe with the input itself."""
    branches = [_convolve(draw, x) * draw.pick(1.0, 4.0) for _ in range(draw.pick(1, 2))]
    branches.append(draw.pick(x, _convolve(draw, x)))
    return layers.Concatenate(axis=draw.pick(-1, -1, 1))(branches)


def split(draw: Draw, x: Tensor) -> Tensor:
    """Parts of a layer that are joined in another order, or of which one is dropped."""
    parts = ops.split(_convolve(draw, x, 8), draw.pick(2, 4), axis=-1)
    if draw.happens(0.3):
        return _convolve(draw, parts[-1])
    first = _convolve(draw, parts[0], parts[0].shape[-1])
    return layers.Concatenate()([*parts[1:], first])


def shared_layer(draw: Draw, x: Tensor) -> Tensor:
    """A layer that is called twice."""
    width = x.shape[-1]
    kind = layers.Conv2D(width, 3, padding="same") if len(x.shape) == 4 else layers.Dense(width)
    return kind(ops.tanh(kind(x)))


def gate(draw: Draw, x: Tensor) -> Tensor:
    """A product with a sigmoid, of the tensor itself or of another layer."""
    inner = _convolve(draw, x)
    source = draw.pick(inner, _convolve(draw, x))
    return layers.Multiply()([inner, ops.sigmoid(source)])


def squeeze(draw: Draw, x: Tensor) -> Tensor:
    """Channels scaled by what their means say."""
    axes = tuple(range(1, len(x.shape) - 1))
    means = ops.mean(x, axis=axes, keepdims=True)
    scale = layers.Dense(x.shape[-1], activation=draw.pick("sigmoid", "hard_sigmoid"))(means)
    return x * scale


def branch_output(draw: Draw, x: Tensor) -> tuple[Tensor, Tensor]:
    """A layer whose result is an output of the net, and read by others."""
    inner = _convolve(draw, x)
    return inner, inner


def arithmetic(draw: Draw, x: Tensor) -> Tensor:
    """Differences, products, extremes and quotients of two layers."""
    a, b = _convolve(draw, x), _convolve(draw, x)
    return draw.pick(
        lambda: a - b,
        lambda: a * b,
        lambda: ops.maximum(a, b),
        lambda: ops.minimum(a, b),
        lambda: a / (ops.abs(b) + 0.5),
        lambda: ops.sqrt(ops.square(a) + 0.1),
        lambda: ops.where(a > 0, a, 0.1 * a),
    )()


def resize(draw: Draw, x: Tensor) -> Tensor:
    """A larger image, summed over windows."""
    way = draw.pick("nearest", "bilinear")
    larger = layers.UpSampling2D(2, interpolation=way)(_convolve(draw, x))
    return draw.pick(layers.MaxPooling2D, layers.AveragePooling2D)(2)(larger)


def depthwise(draw: Draw, x: Tensor) -> Tensor:
    """Filters of single channels, several for each, maybe spread or with a stride."""
    spacing = draw.pick({}, {"strides": 2}, {"dilation_rate": 2})
    multiplier = draw.pick(1, 2)
    kind = layers.DepthwiseConv2D if len(x.shape) == 4 else layers.DepthwiseConv1D
    return kind(3, padding="same", depth_multiplier=multiplier, **spacing)(x)


def transposed(draw: Draw, x: Tensor) -> Tensor:
    """A transposed convolution behind one with a stride."""
    small = layers.Conv2D(8, 3, strides=2, padding="same", activation="relu")(x)
    padding, kernel = draw.pick("same", "valid"), draw.pick(2, 3)
    return layers.Conv2DTranspose(4, kernel, strides=2, padding=padding)(small)


def dilated(draw: Draw, x: Tensor) -> Tensor:
    """A convolution whose filter has gaps, or whose channels form groups."""
    options = draw.pick({"dilation_rate": 2}, {"groups": 2}, {"strides": 2, "padding": "valid"})
    width = x.shape[-1] if "groups" in options and x.shape[-1] % 2 == 0 else 8
    if width % 2 or x.shape[-1] % 2:
        options.pop("groups", None)
    kind = layers.Conv2D if len(x.shape) == 4 else layers.Conv1D
    return kind(width, 3, **{"padding": "same", **options})(x)


def shaping(draw: Draw, x: Tensor) -> Tensor:
    """Padding, cropping, permutations and reshaping between layers."""
    inner = _convolve(draw, x)
    if len(x.shape) != 4:
        return draw.pick(
            lambda: layers.ZeroPadding1D(1)(inner),
            lambda: layers.Permute((2, 1))(inner),
            lambda: inner[:, 1:-1],
            lambda: ops.flip(inner, 1),
        )()
    _, height, width, depth = inner.shape
    return draw.pick(
        lambda: layers.ZeroPadding2D(1)(inner),
        lambda: layers.Cropping2D(1)(inner),
        lambda: layers.Permute((2, 1, 3))(inner),
        lambda: layers.Reshape((height * width, depth))(inner),
        lambda: ops.pad(inner, [(0, 0), (1, 1), (1, 1), (0, 0)], mode="reflect"),
        lambda: layers.MaxPooling2D(2, strides=1)(inner),
    )()


def attention(draw: Draw, x: Tensor) -> Tensor:
    """Attention over a sequence, with a norm and a residual sum."""
    normed = layers.LayerNormalization()(x) if draw.happens() else x
    attended = layers.MultiHeadAttention(2, 4)(normed, normed)
    return layers.Add()([attended, x])


def _recur(kind: type[layers.Layer], draw: Draw, x: Tensor) -> Tensor:
    unroll = draw.happens()
    sequences = draw.happens()
    if x.shape[1] > 12:
        x = x[:, :4]
    states = kind(8, return_sequences=sequences, unroll=unroll)(layers.Dense(8)(x))
    return states if sequences else layers.Reshape((1, 8))(states)


def lstm(draw: Draw, x: Tensor) -> Tensor:
    """An LSTM, unrolled or as a loop."""
    return _recur(layers.LSTM, draw, x)


def gru(draw: Draw, x: Tensor) -> Tensor:
    """A GRU, unrolled or as a loop."""
    return _recur(layers.GRU, draw, x)


def feed_forward(draw: Draw, x: Tensor) -> Tensor:
    """Two dense layers with a norm and a residual sum, as in transformers."""
    inner = layers.Dense(16, activation=draw.pick("gelu", "silu", "relu"))(x)
    total = layers.Add()([layers.Dense(x.shape[-1])(inner), x])
    return layers.LayerNormalization()(total) if draw.happens() else total


#: Blocks of images and of sequences, of images alone, and of sequences alone.
_BOTH: Mapping[str, Block] = {
    function.__name__: function
    for function in (
        residual,
        concatenation,
        split,
        shared_layer,
        gate,
        squeeze,
        branch_output,
        arithmetic,
        depthwise,
        dilated,
        shaping,
    )
}
_ON_IMAGES: Mapping[str, Block] = {f.__name__: f for f in (resize, transposed)}
_ON_SEQUENCES: Mapping[str, Block] = {f.__name__: f for f in (attention, lstm, gru, feed_forward)}
_BLOCKS = {**_BOTH, **_ON_IMAGES, **_ON_SEQUENCES}
FAMILIES = (*_BLOCKS, "embedding", "integers", "several_inputs")


@dataclass(frozen=True)
class DrawnNet:
    """A drawn net.

    Attributes:
        content: the LiteRT file.
        kind: the family that was asked for.
        words: the drawn constructs.
        feeds: input → array, of each batch.
        batch: the batch size that the file fixes, if any.
    """

    content: bytes
    kind: str
    words: str
    feeds: Sequence[Mapping[str, np.ndarray]]
    batch: int | None

    def __str__(self) -> str:
        return self.words


def draw_net(seed: int, kind: str | None = None) -> DrawnNet:
    """Return a net of one to three blocks, of which one is of the given family, or any.

    Loops of LSTM and GRU need a fixed batch size.
    """
    draw = Draw(np.random.default_rng(seed))
    kind = kind or str(draw.pick(*FAMILIES))
    keras.utils.set_random_seed(seed)
    net, words = _draw_model(draw, kind)
    loops = "lstm" in words or "gru" in words
    batch = draw.pick(SAMPLES, 1) if loops else draw.pick(None, None, SAMPLES, 1)
    feeds = [{port.name: _draw_values(draw, port) for port in net.inputs} for _ in range(2)]
    content = as_litert(fix_batch(net, batch) if batch else net)
    words.append(f"batch of {batch or 'any size'}")
    return DrawnNet(content, kind, ", ".join(words), feeds, batch)


def _draw_model(draw: Draw, kind: str) -> tuple[keras.Model, list[str]]:
    """Return a net and its blocks; blocks that do not fit each other are drawn again."""
    for _ in range(_MAX_DRAWS):
        with suppress(ValueError):
            return _draw_blocks(draw, kind)
    raise ValueError(f"{kind} must fit other blocks in {_MAX_DRAWS} draws, got none")


def _draw_blocks(draw: Draw, kind: str) -> tuple[keras.Model, list[str]]:
    is_sequence = kind in _ON_SEQUENCES or kind == "embedding"
    if not is_sequence and kind not in _ON_IMAGES:
        is_sequence = draw.happens(0.3)
    inputs, x, words = _draw_inputs(draw, kind, is_sequence)
    outputs = []
    names = [kind] if kind in _BLOCKS else [str(draw.pick(*_list_blocks(x)))]
    names.extend(str(draw.pick(*_list_blocks(x))) for _ in range(draw.pick(0, 1, 2)))
    for name in names:
        blocks = _list_blocks(x)
        if name not in blocks:  # images have become sequences
            continue
        result = blocks[name](draw, x)
        if isinstance(result, tuple):
            result, output = result
            outputs.append(output)
        x = result
        words.append(name)
    outputs.append(_end(draw, x))
    if draw.happens(0.2):
        outputs.append(layers.Dense(3)(_flatten(draw, x)))
    return keras.Model(inputs, outputs if len(outputs) > 1 else outputs[0]), words


def _list_blocks(x: Tensor) -> Mapping[str, Block]:
    return {**_BOTH, **(_ON_IMAGES if len(x.shape) == 4 else _ON_SEQUENCES)}


def _draw_inputs(
    draw: Draw, kind: str, is_sequence: bool
) -> tuple[list[Tensor], Tensor, list[str]]:
    """Return the inputs, what the blocks read, and words for it."""
    if kind == "embedding":
        tokens = keras.Input((SEQUENCE[0],), dtype="int32", name="tokens")
        return [tokens], layers.Embedding(_WORDS, SEQUENCE[1])(tokens), ["embedding"]
    shape = SEQUENCE if is_sequence else IMAGE
    if kind == "integers":
        dtype = draw.pick("uint8", "int32")
        pixels = keras.Input(shape, dtype=dtype, name="pixels")
        scaled = ops.cast(pixels, "float32") / 255.0
        return [pixels], _stem(scaled), [f"inputs of {dtype}"]
    first = keras.Input(shape, name="first")
    if kind != "several_inputs":
        return [first], draw.pick(first, _stem(first)), []
    second = keras.Input(shape, name="second")
    joined = draw.pick(layers.Concatenate(), layers.Add())([first, _stem(second)])
    return [first, second], joined, ["several inputs"]


def _stem(x: Tensor) -> Tensor:
    kind = layers.Conv2D if len(x.shape) == 4 else layers.Conv1D
    return kind(x.shape[-1], 3, padding="same", activation="relu")(x)


def _flatten(draw: Draw, x: Tensor) -> Tensor:
    axes = tuple(range(1, len(x.shape) - 1))
    return ops.mean(x, axis=axes) if axes and draw.happens() else layers.Flatten()(x)


def _end(draw: Draw, x: Tensor) -> Tensor:
    """Return the output of a net: a head, or the last block itself."""
    if draw.happens(0.2):
        return x
    head = layers.Dense(5)(_flatten(draw, x))
    return layers.Softmax()(head) if draw.happens(0.2) else head


def _draw_values(draw: Draw, port: Tensor) -> np.ndarray:
    shape = (SAMPLES, *port.shape[1:])
    if port.name == "tokens":
        return draw.random.integers(0, _WORDS, shape).astype(np.int32)
    if port.name == "pixels":
        return draw.random.integers(0, 256, shape).astype(port.dtype)
    return draw.random.normal(size=shape).astype(np.float32)
