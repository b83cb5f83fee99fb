"""`.tflite` files as TensorFlow's converter writes them, of tiny nets and of many kinds of op."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")

import keras
import numpy as np
import tensorflow as tf
from keras import layers as L
from tensorflow.python.framework.convert_to_constants import convert_variables_to_constants_v2

IMAGE, ROWS, IDS = (1, 8, 8, 4), (1, 6, 4), (1, 6)
WAYS = ("float", "dynamic", "float16", "int8")
#: Files that LiteRT alone cannot run → words of the reason.
REFUSED = {
    "flex": "'FlexMatrixInverse' runs inside of TensorFlow",
    "custom": "'MatrixInverse' is custom",
    "stable": "'STABLEHLO_DOT_GENERAL' is not supported",
}

Net = Callable[[Any], Any]


def _layer(*parts: Callable[[], Any]) -> Net:
    """A net of layers, which are made once."""

    @cache
    def net() -> Any:
        return keras.Sequential([part() for part in parts])

    return lambda x: net()(x)


@cache
def _part(make: Callable[[], Any]) -> Any:
    return make()


def _attend(x: Any) -> Any:
    return _part(_heads)(x, x)


def _heads() -> Any:
    return L.MultiHeadAttention(2, 4)


def _act(kind: str) -> Net:
    return _layer(
        lambda: L.Conv2D(4, 3, padding="same", name=f"c_{kind}"), lambda: L.Activation(kind)
    )


#: Nets of layers, which are converted in all ways.
LAYERS: dict[str, tuple[tuple[int, ...], Net]] = {
    "conv": (
        IMAGE,
        _layer(lambda: L.Conv2D(8, 3), lambda: L.BatchNormalization(), lambda: L.ReLU()),
    ),
    "conv strided": (IMAGE, _layer(lambda: L.Conv2D(8, 3, 2, padding="same", activation="relu6"))),
    "conv dilated": (IMAGE, _layer(lambda: L.Conv2D(8, 3, dilation_rate=2))),
    "conv grouped": (IMAGE, _layer(lambda: L.Conv2D(8, 3, groups=2))),
    "conv 1d": (ROWS, _layer(lambda: L.Conv1D(8, 3))),
    "conv 3d": ((1, 4, 4, 4, 2), _layer(lambda: L.Conv3D(3, 2))),
    "depthwise": (IMAGE, _layer(lambda: L.DepthwiseConv2D(3), lambda: L.ReLU(6.0))),
    "separable": (IMAGE, _layer(lambda: L.SeparableConv2D(8, 3))),
    "transposed": (IMAGE, _layer(lambda: L.Conv2DTranspose(5, 3, 2))),
    "dense": (ROWS, _layer(lambda: L.Dense(8, "relu"), lambda: L.Flatten(), lambda: L.Dense(3))),
    "max pool": (IMAGE, _layer(lambda: L.MaxPooling2D())),
    "average pool": (IMAGE, _layer(lambda: L.AveragePooling2D(2))),
    "global pools": (
        IMAGE,
        lambda x: tf.concat([tf.reduce_max(x, (1, 2)), tf.reduce_mean(x, (1, 2))], 1),
    ),
    "padding": (IMAGE, _layer(lambda: L.ZeroPadding2D(1), lambda: L.Cropping2D(2))),
    "upsampling": (IMAGE, _layer(lambda: L.UpSampling2D(2, interpolation="bilinear"))),
    "nearest": (IMAGE, _layer(lambda: L.UpSampling2D(2))),
    "layer norm": (ROWS, _layer(lambda: L.LayerNormalization(), lambda: L.Dense(4))),
    "group norm": (IMAGE, _layer(lambda: L.GroupNormalization(2))),
    "attention": (ROWS, _attend),
    "permute": (ROWS, _layer(lambda: L.Permute((2, 1)), lambda: L.Reshape((3, 8)))),
    "repeat": ((1, 4), _layer(lambda: L.RepeatVector(3))),
    "prelu": (IMAGE, _layer(lambda: L.Conv2D(4, 1), lambda: L.PReLU(shared_axes=[1, 2]))),
    "leaky": (IMAGE, _layer(lambda: L.Conv2D(4, 1), lambda: L.LeakyReLU(0.1))),
    "unrolled lstm": (ROWS, _layer(lambda: L.LSTM(4, unroll=True))),
    "squeeze and excite": (
        IMAGE,
        lambda x: x * tf.sigmoid(tf.reduce_mean(x, (1, 2), keepdims=True)),
    ),
    **{
        kind: (IMAGE, _act(kind))
        for kind in ("relu", "elu", "gelu", "swish", "hard_swish", "softmax")
    },
    **{kind: (IMAGE, _act(kind)) for kind in ("tanh", "softplus", "selu")},
}

#: Single functions of TensorFlow, which are converted in float.
OPS: dict[str, tuple[tuple[int, ...], Net]] = {
    "arithmetic": (ROWS, lambda x: (x + 1) * (x - 2) / (tf.abs(x) + 1) - tf.square(x)),
    "of two": (ROWS, lambda x: tf.maximum(x, tf.minimum(x[:, ::-1], 0.5)) ** 2.0),
    "roots": (ROWS, lambda x: tf.sqrt(tf.abs(x)) + tf.math.rsqrt(tf.exp(x)) + tf.math.log(x + 9)),
    "waves": (ROWS, lambda x: tf.sin(x) + tf.cos(x) + tf.floor(x) + tf.round(x) + tf.math.ceil(x)),
    "reductions": (
        ROWS,
        lambda x: (tf.reduce_sum(x, 1), tf.reduce_prod(x, 2), tf.reduce_min(x, 1)),
    ),
    "logic": (ROWS, lambda x: tf.logical_and(x > 0, tf.logical_not(x < 0.5)) | (x == 1) | (x >= 2)),
    "any": (ROWS, lambda x: (tf.reduce_any(x > 0, 1), tf.reduce_all(x > 0, 1))),
    "where": (ROWS, lambda x: tf.where(x > 0, x, -x)),
    "indices": (ROWS, lambda x: tf.where(x[0] > 0)),
    "arg": (ROWS, lambda x: (tf.argmax(x, 1), tf.argmin(x, 2))),
    "top k": (ROWS, lambda x: tf.math.top_k(x, 2)),
    "split": (ROWS, lambda x: tf.split(x, 2, 2)),
    "split in sizes": (ROWS, lambda x: tf.split(x, [1, 3], 2)),
    "stack": (ROWS, lambda x: tf.stack(tf.unstack(x, axis=1), 2)),
    "slices": (ROWS, lambda x: (x[:, 1:-1:2], tf.slice(x, [0, 1, 1], [1, 2, 2]))),
    "gather": (ROWS, lambda x: tf.gather(x, [2, 0], axis=1)),
    "gather nd": (ROWS, lambda x: tf.gather_nd(x, [[0, 1], [0, 3]])),
    "scatter": (ROWS, lambda x: tf.scatter_nd([[1], [3]], x[0, :2], [8, 4])),
    "one hot": (ROWS, lambda x: tf.one_hot(tf.cast(x[:, :, 0], tf.int32), 5)),
    "casts": (ROWS, lambda x: tf.cast(tf.cast(x, tf.int32), tf.float32)),
    "tile": (ROWS, lambda x: tf.tile(x, [1, 2, 1])),
    "pads": (
        ROWS,
        lambda x: (
            tf.pad(x, [[0, 0], [1, 1], [0, 0]], "REFLECT"),
            tf.pad(x, [[0, 0], [1, 0], [0, 0]], constant_values=2.0),
        ),
    ),
    "space": (IMAGE, lambda x: tf.nn.space_to_depth(tf.nn.depth_to_space(x, 2), 2)),
    "blocks": (
        IMAGE,
        lambda x: tf.batch_to_space(
            tf.space_to_batch(x, [2, 2], [[0, 0], [0, 0]]), [2, 2], [[0, 0], [0, 0]]
        ),
    ),
    "normalized": (
        IMAGE,
        lambda x: (
            tf.nn.local_response_normalization(x),
            tf.math.l2_normalize(x, 3),
            tf.nn.log_softmax(x),
        ),
    ),
    "product": (ROWS, lambda x: tf.matmul(x, x, transpose_b=True)),
    "cumulated": (ROWS, lambda x: tf.cumsum(x, 1)),
    "reversed": (ROWS, lambda x: (tf.reverse(x, [1]), tf.reverse_sequence(x, [3], 1))),
    "range": (ROWS, lambda x: tf.range(tf.cast(x[0, 0, 0], tf.int32) + 5)),
    "filled": (ROWS, lambda x: tf.fill([2, 3], x[0, 0, 0]) + tf.zeros_like(x)[0, :2, :3]),
    "broadcast": (ROWS, lambda x: tf.broadcast_to(x[:, :1], [2, 5, 4])),
    "shapes": (
        ROWS,
        lambda x: tf.reshape(x, [-1, tf.shape(x)[1] * 2]) + tf.cast(tf.rank(x), tf.float32),
    ),
    "expanded": (ROWS, lambda x: tf.squeeze(tf.expand_dims(x, 2), 0)),
    "integer division": (ROWS, lambda x: (tf.math.floordiv(x, 2.0), tf.math.floormod(x, 2.0))),
    "sum of many": (ROWS, lambda x: tf.add_n([x, x, x])),
    "segments": (ROWS, lambda x: tf.math.unsorted_segment_sum(x[0], [0, 1, 0, 1, 2, 2], 3)),
    "boxes": (IMAGE, lambda x: tf.image.non_max_suppression(x[0, 0], x[0, 1, :, 0], 3)),
    "signal": (ROWS, lambda x: tf.abs(tf.signal.rfft2d(tf.transpose(x, [0, 2, 1])[:, :, :4]))),
    "choice": (ROWS, lambda x: tf.cond(x[0, 0, 0] > 0, lambda: x + 1, lambda: tf.sin(x))),
    "loop": (
        ROWS,
        lambda x: tf.while_loop(lambda k, y: k < 3, lambda k, y: (k + 1, y * 2), [0, x])[1],
    ),
    "embedding": (
        ROWS,
        lambda x: tf.nn.embedding_lookup(
            tf.ones((7, 3)), tf.cast(tf.clip_by_value(x[0, :, 0], 0, 6), tf.int32)
        ),
    ),
    "unique": (ROWS, lambda x: tf.unique(x[0, 0])),
    "diagonal": (ROWS, lambda x: tf.linalg.diag(x[0, 0])),
    "signs": (ROWS, lambda x: (tf.sign(x), tf.negative(x), tf.atan2(x, x + 1))),
    "selected": (ROWS, lambda x: tf.boolean_mask(x[0], [True, False] * 3)),
    "random": (ROWS, lambda x: x + tf.random.uniform(ROWS)),
    "buckets": (ROWS, lambda x: tf.raw_ops.Bucketize(input=x, boundaries=[0.0, 0.5])),
    "bits": (ROWS, lambda x: tf.bitwise.bitwise_xor(tf.cast(x, tf.int32), 3)),
    "gru": (ROWS, _layer(lambda: L.GRU(4))),
    "lstm": (ROWS, _layer(lambda: L.LSTM(4, return_sequences=True))),
    "bidirectional": (ROWS, _layer(lambda: L.Bidirectional(L.LSTM(3)))),
    "fake quantized": (ROWS, lambda x: tf.quantization.fake_quant_with_min_max_args(x, -1, 1)),
}


def samples(shape: tuple[int, ...], count: int) -> Iterator[list[Any]]:
    """Arrays in -1…1, as the converter asks for them."""
    drawn = np.random.default_rng(0)
    for _ in range(count):
        yield [drawn.uniform(-1, 1, shape).astype(np.float32)]


def traced(net: Net, shape: tuple[int, ...]) -> Any:
    """A frozen function of one input."""
    spec = tf.TensorSpec(shape, tf.float32, name="x")
    tf.function(net).get_concrete_function(spec)  # variables are made outside of the next trace
    return convert_variables_to_constants_v2(tf.function(net).get_concrete_function(spec))


def converted(function: Any, way: str) -> bytes:
    """A frozen function of one input, converted."""
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    if way != "float":
        converter.optimizations = [tf.lite.Optimize.DEFAULT]
    if way == "float16":
        converter.target_spec.supported_types = [tf.float16]
    if way == "int8":
        converter.representative_dataset = lambda: samples(tuple(function.inputs[0].shape), 2)
    return bytes(converter.convert())


def _signatures() -> tf.Module:
    module = tf.Module()
    spec = tf.TensorSpec((1, 4), tf.float32, name="x")
    module.double = tf.function(lambda x: {"y": tf.nn.relu(2 * x)}, [spec])
    module.sine = tf.function(lambda x: {"y": tf.sin(x) + 1, "z": x - 1}, [spec])
    return module


def _counter() -> tf.Module:
    module = tf.Module()
    module.total = tf.Variable(tf.zeros((1, 4)))

    def add(x: Any) -> Any:
        return {"y": module.total.assign_add(x) * 1.0}

    module.double = tf.function(add, [tf.TensorSpec((1, 4), tf.float32, name="x")])
    return module


def _from_module(module: tf.Module, names: tuple[str, ...], folder: Path) -> bytes:
    functions = {name: getattr(module, name) for name in names}
    tf.saved_model.save(module, str(folder), signatures=functions)
    converter = tf.lite.TFLiteConverter.from_saved_model(str(folder), signature_keys=list(names))
    converter.experimental_enable_resource_variables = True
    return bytes(converter.convert())


def _inverse(**target: Any) -> bytes:
    """A function that TensorFlow alone computes, converted for a runtime with its ops."""
    function = traced(lambda x: tf.linalg.inv(x[:, :4]), ROWS)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    converter.allow_custom_ops = not target
    for name, value in target.items():
        setattr(converter.target_spec, name, value)
    return bytes(converter.convert())


def _two_inputs() -> keras.Model:
    first, second = keras.Input((4,), name="first"), keras.Input((4,), name="second")
    total = L.Dense(3, name="total")(L.Concatenate()([first, second]))
    return keras.Model([first, second], [total, L.ReLU()(first)])


def from_keras(net: keras.Model, batch: int | None) -> bytes:
    """A Keras model, converted with its signature; None for a free batch size."""
    if batch is not None:
        inputs = [keras.Input(batch_shape=(batch, *x.shape[1:]), name=x.name) for x in net.inputs]
        net = keras.Model(inputs, net(inputs))
    return bytes(tf.lite.TFLiteConverter.from_keras_model(net).convert())


#: Nets of `keras.applications`.
APPLICATIONS: dict[str, Callable[[], keras.Model]] = {
    "mobile net 2": lambda: keras.applications.MobileNetV2(
        (32, 32, 3), alpha=0.35, weights=None, classes=4
    ),
    "mobile net 3": lambda: keras.applications.MobileNetV3Small(
        (32, 32, 3), weights=None, classes=4
    ),
}


@cache
def convert_all() -> dict[str, bytes]:
    """Return the contents of all files by name."""
    keras.utils.set_random_seed(0)
    files = {}
    for name, (shape, net) in LAYERS.items():
        function = traced(net, shape)
        files.update({f"{name} {way}": converted(function, way) for way in WAYS})
    for name, (shape, net) in OPS.items():
        files[name] = converted(traced(net, shape), "float")
    for name, make in APPLICATIONS.items():
        function = traced(make(), (1, 32, 32, 3))
        files.update({f"{name} {way}": converted(function, way) for way in ("float16", "int8")})
    files["any batch"], files["batch of two"] = (from_keras(_two_inputs(), b) for b in (None, 2))
    builtins, flex = tf.lite.OpsSet.TFLITE_BUILTINS, tf.lite.OpsSet.SELECT_TF_OPS
    files["flex"] = _inverse(supported_ops=[builtins, flex])
    files["custom"] = _inverse()
    files["stable"] = _stable()
    with TemporaryDirectory() as folder:
        home = Path(folder)
        files["signatures"] = _from_module(_signatures(), ("double", "sine"), home / "signatures")
        files["variables"] = _from_module(_counter(), ("double",), home / "variables")
    return files


def _stable() -> bytes:
    """A product in ops of StableHLO, which the runtime has no kernels for."""
    function = traced(lambda x: x @ tf.ones((4, 4)), ROWS)
    converter = tf.lite.TFLiteConverter.from_concrete_functions([function])
    converter.target_spec.supported_ops = [tf.lite.OpsSet.EXPERIMENTAL_STABLEHLO_OPS]
    return bytes(converter.convert())
