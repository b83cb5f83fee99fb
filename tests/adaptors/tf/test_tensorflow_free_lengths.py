"""Inputs of any length: sizes are constant, and tensors are summed in place, only if derived."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st
from symbolic_values import value_of

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph import shape_inference
from neural_mp.adaptors.tensorflow.graph.shape_inference import with_sizes
from neural_mp.core.precision import Precision
from neural_mp.space import limit_to_reached
from neural_mp.testing import signal_to_noise, uniform

layers = keras.layers


def drawn(*shape):
    return np.random.default_rng(len(shape)).normal(size=shape).astype(np.float32)


def weight(*shape):
    return tf.constant(drawn(*shape) / np.sqrt(np.prod(shape[:-1])), tf.float32)


def convolved(x, size=8, stride=1, channels=16):
    kernel = weight(size, x.shape[-1], channels)
    return tf.nn.relu(tf.nn.conv1d(x, kernel, stride, "SAME"))


def long_stride(x):
    """Frames of 4,096 samples, and the whole clip."""
    for _ in range(6):
        x = convolved(x, stride=4)
    frames = tf.tensordot(x, weight(16, 8), 1)
    return {"frames": frames, "clip": tf.reduce_mean(frames, 1)}


def multiple(x):
    """Padded to a multiple of 2,048 samples, as nets with skip connections are."""
    x = tf.pad(x, [[0, 0], [0, -tf.shape(x)[1] % 2048], [0, 0]])
    frames = tf.reshape(x, [tf.shape(x)[0], -1, 2048])
    return {"scores": tf.nn.relu(tf.tensordot(frames, weight(2048, 16), 1)) @ weight(1, 16, 4)}


def least_length(x):
    """Padded to 15,600 samples, and cut into patches, as speech front ends do."""
    x = tf.pad(x, [[0, 0], [0, tf.maximum(0, 15600 - tf.shape(x)[1])], [0, 0]])
    patches = tf.signal.frame(x[..., 0], 400, 160)
    return {"scores": tf.nn.relu(tf.tensordot(patches, weight(400, 16), 1)) @ weight(1, 16, 4)}


def limited(x):
    """At most 10,000 samples."""
    x = convolved(x[:, :10000], stride=8)
    return {"scores": tf.tensordot(x, weight(16, 4), 1)}


def mean_pooled(x):
    x = tf.nn.avg_pool1d(convolved(x), 2048, 2048, "SAME")
    return {"scores": tf.tensordot(x, weight(16, 4), 1)}


def gated(x):
    """A gate from the mean, added to frames of 4,096 samples: equal sizes for short inputs."""
    x = x[:, :, None]
    for _ in range(6):
        kernel = weight(8, 1, x.shape[-1], 16)
        x = tf.nn.relu(tf.nn.conv2d(x, kernel, [1, 4, 1, 1], "SAME"))
    kernel = weight(1, 1, 16, 16)
    gate = tf.nn.relu(tf.nn.conv2d(tf.reduce_mean(x, [1, 2], keepdims=True), kernel, 1, "SAME"))
    summed = tf.nn.relu(tf.nn.conv2d(x, kernel, 1, "SAME") + gate)
    return {"scores": tf.nn.conv2d(summed, kernel, 1, "SAME")}


NETS = [long_stride, multiple, least_length, limited, mean_pooled, gated]
LENGTHS = [(2, 16384), (3, 700), (1, 15601), (2, 40961)]


def loaded(net, shape=(None, None, 1)):
    spec = tf.TensorSpec(shape, tf.float32, "wave")
    function = tf.function(net, input_signature=[spec], autograph=False)
    return TensorFlowAdaptor().load(function.get_concrete_function())


def in_int8(model, batch, machine):
    """The model with all ops in INT8 that can be."""
    adaptor = TensorFlowAdaptor()
    space = adaptor.space(model, machine)
    observations = adaptor.observe(model, [batch], space)
    space = limit_to_reached(space, observations.ranges)
    plan = space.resolve(uniform(space, Precision.INT8))
    return adaptor.convert(model, plan, observations, space)


def agree(expected, results, decibels):
    assert set(results) == set(expected)
    for name, value in expected.items():
        assert np.shape(results[name]) == np.shape(value)
        assert signal_to_noise(np.asarray(value), np.asarray(results[name])) > decibels


@pytest.mark.slow
@pytest.mark.parametrize("net", NETS)
def test_outputs_are_those_of_tensorflow_at_any_length(net, all_machine, tmp_path):
    """Also in plain TensorFlow after saving; calibrated at one length."""
    adaptor, model = TensorFlowAdaptor(), loaded(net)
    converted = in_int8(model, drawn(4, 16384, 1), all_machine)
    assert any("Quantized" in node.op for node in converted.graph.nodes.values())
    adaptor.save(converted, tmp_path)
    served = tf.saved_model.load(str(tmp_path)).signatures["serving_default"]
    for batch, length in LENGTHS:
        wave = drawn(batch, length, 1)
        expected = net(tf.constant(wave))
        agree(expected, adaptor.predict(model, wave), 80)
        agree(expected, adaptor.predict(converted, wave), 15)
        agree(expected, served(wave=tf.constant(wave)), 15)


@pytest.mark.parametrize(
    ("size", "channels", "in_int8_too"),
    [(8, 16, False), (16, 8, False), (12, 16, False), (8, 8, True), (4, 16, True), (8, 32, True)],
)
def test_convolutions_that_are_wrong_with_amx_stay_in_float(
    size, channels, in_int8_too, all_machine
):
    """Measured on a CPU with AMX; a model saved elsewhere may run on such a CPU."""

    def net(x):
        x = convolved(convolved(x, channels=channels), size=size)
        return {"frames": tf.tensordot(x, weight(16, 8), 1)}

    wave = drawn(2, 256, 1)
    converted = in_int8(loaded(net), wave, all_machine)
    layers = [n for n in converted.graph.nodes.values() if "QuantizedConv2D" in n.op]
    assert len(layers) == 1 + in_int8_too
    agree(net(tf.constant(wave)), TensorFlowAdaptor().predict(converted, wave), 15)


def sums(model):
    groups = model.structure.fusion_groups.values()
    return [group.head for group in groups if group.residual_sum is not None]


def test_tensors_of_possibly_unequal_sizes_are_not_summed_in_place():
    assert not sums(loaded(gated))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(32, 32, 3), (None, None, 3)])
def test_residual_sums_are_fused_for_images_of_any_size(shape):
    image = keras.Input(shape)
    x = layers.Conv2D(8, 7, 2, padding="same", activation="relu")(image)
    x = layers.MaxPooling2D(3, 2)(layers.ZeroPadding2D()(x))
    for channels, stride in ((8, 1), (16, 2), (24, 2)):
        y = layers.Conv2D(channels, 3, stride, padding="same", activation="relu")(x)
        y = layers.Conv2D(channels, 3, padding="same")(y)
        shortcut = layers.Conv2D(channels, 1, stride)(x)
        x = layers.ReLU()(layers.Add()([y, shortcut]))
    model = TensorFlowAdaptor().load(keras.Model(image, x))
    assert len(sums(model)) == 3


def test_a_tensor_that_grows_in_a_loop_has_no_constant_size():
    def net(x):
        def grown(step, rows, same):
            return step + 1, tf.concat([rows, rows[:, :1]], 1), tf.nn.relu(same)

        free = (tf.TensorShape([]), tf.TensorShape([None, None, 4]), tf.TensorShape([None, 1, 4]))
        first = tf.reduce_max(x, 1, keepdims=True)
        _, rows, same = tf.while_loop(lambda step, *_: step < 3, grown, (0, first, first), free)
        return {"rows": rows + 0.0, "same": same + 0.0}

    model = loaded(net, (None, None, 4))
    ports = {port.name: port.tensor for port in model.signature.outputs}
    assert model.shapes[ports["rows"]] == (None, None, 4)
    assert model.shapes[ports["same"]] == (None, 1, 4)


@pytest.mark.slow
def test_a_chain_of_loop_variables_takes_few_passes_and_has_no_constant_sizes(monkeypatch, caplog):
    """Each variable takes the value of the one before, so that each pass finds one more change."""
    count = 2 * shape_inference.MAX_PASSES

    def net(x):
        def shifted(step, *rows):
            return step + 1, tf.concat([rows[0], rows[0][:, :1]], 1), *rows[:-1]

        free = (tf.TensorShape([]), *[tf.TensorShape([None, None, 4])] * count)
        first = tf.reduce_max(x, 1, keepdims=True)
        _, *rows = tf.while_loop(lambda step, *_: step < 3, shifted, (0, *[first] * count), free)
        return {"first": rows[0] + 0.0, "last": rows[-1] + 0.0}

    passes: list[shape_inference._Inference] = []
    derive_facts = shape_inference._Inference._derive_facts

    def count_passes(inference, order):
        passes.append(inference)
        derive_facts(inference, order)

    monkeypatch.setattr(shape_inference._Inference, "_derive_facts", count_passes)
    with caplog.at_level(logging.WARNING):
        model = loaded(net, (None, None, 4))
        ports = {port.name: port.tensor for port in model.signature.outputs}
        assert model.shapes[ports["first"]] == (None, None, None)
        assert model.shapes[ports["last"]] == (None, None, None)
    assert "loop variables are unknown" in caplog.text
    assert max(Counter(passes).values()) <= shape_inference.MAX_PASSES + 2


@dataclass(frozen=True)
class Step:
    """A part of a net on [batch, length, channels]."""

    name: str
    apply: Callable[[tf.Tensor], tf.Tensor]


def folded(block):
    def apply(x):
        padded = tf.pad(x, [[0, 0], [0, -tf.shape(x)[1] % block], [0, 0]])
        return tf.reshape(padded, [tf.shape(x)[0], -1, block * x.shape[-1]])[..., : x.shape[-1]]

    return Step(f"folded {block}", apply)


def flattened(x):
    sizes = tf.shape(x)
    rows = tf.reshape(x, [tf.reduce_prod(sizes[:2]), x.shape[-1]])
    return tf.reshape(tf.nn.relu(rows), [sizes[0], sizes[1], x.shape[-1]])


def dilated(rate):
    def apply(x):
        around = [[0, -tf.shape(x)[1] % rate]]
        spread = tf.space_to_batch(x, [rate], around)
        return tf.batch_to_space(tf.nn.relu(spread), [rate], around)

    return Step(f"dilated {rate}", apply)


def cut(begin, end, step):
    return Step(f"cut {begin}:{end}:{step}", lambda x: x[:, begin:end:step])


_SIZES = st.integers(1, 6000)
_BOUNDS = st.none() | st.integers(-6000, 6000)
_STEPS = st.one_of(
    st.builds(
        lambda stride, padding: Step(
            f"conv {stride} {padding}",
            lambda x: tf.nn.conv1d(x, weight(3, x.shape[-1], 4), stride, padding),
        ),
        st.integers(1, 64),
        st.sampled_from(["SAME", "VALID"]),
    ),
    st.builds(
        lambda stride: Step(f"pool {stride}", lambda x: tf.nn.max_pool1d(x, 2, stride, "SAME")),
        st.integers(1, 64),
    ),
    st.builds(
        lambda least: Step(
            f"least {least}",
            lambda x: tf.pad(x, [[0, 0], [0, tf.maximum(0, least - tf.shape(x)[1])], [0, 0]]),
        ),
        _SIZES,
    ),
    st.builds(
        lambda most: Step(
            f"most {most}",
            lambda x: tf.slice(x, [0, 0, 0], [-1, tf.minimum(most, tf.shape(x)[1]), -1]),
        ),
        _SIZES,
    ),
    st.builds(cut, _BOUNDS, _BOUNDS, st.integers(1, 3)),
    st.builds(folded, st.integers(1, 3000)),
    st.builds(dilated, st.integers(1, 5)),
    st.sampled_from(
        [
            Step("flattened", flattened),
            Step("doubled", lambda x: tf.concat([x, x], 1)),
            Step("repeated", lambda x: tf.repeat(x, 2, axis=1)),
            Step("mean added", lambda x: x + tf.reduce_mean(x, 1, keepdims=True)),
            Step("reversed", lambda x: tf.transpose(tf.transpose(x, [1, 0, 2])[::-1], [1, 0, 2])),
            Step("cropped", lambda x: tf.pad(x, [[0, 0], [2, 1], [0, 0]])[:, 1:-2]),
        ]
    ),
)


@pytest.mark.slow
@settings(max_examples=15)
@given(st.lists(_STEPS, min_size=1, max_size=6), st.integers(1, 5), st.integers(1, 20000))
def test_derived_sizes_are_those_of_every_length(
    steps: Sequence[Step], batch: int, length: int
) -> None:
    """TensorFlow infers all sizes from those of the input; not all nets accept all lengths."""

    def net(x: tf.Tensor) -> tf.Tensor:
        for step in steps:
            x = tf.ensure_shape(step.apply(x), [None, None, 4])
        return x

    model = loaded(net, (None, None, 4))
    (port,) = model.signature.inputs
    concrete = with_sizes(model.graph, {port.tensor: (batch, length, 4)})
    if concrete is None:
        return
    sizes = {
        f"{operation.name}:{index}": tuple(tensor.shape.as_list())
        for operation in concrete.get_operations()
        for index, tensor in enumerate(operation.outputs)
        if tensor.shape.rank is not None
    }
    unknowns = {
        f"{tensor}[{axis}]": size
        for tensor, shape in sizes.items()
        for axis, size in enumerate(shape)
        if size is not None
    }
    compared = 0
    for name, results in model.shapes.symbolic.items():
        for index, shape in enumerate(results):
            expected = sizes.get(f"{name}:{index}")
            if shape is None or expected is None or None in expected:
                continue
            try:
                values = tuple(value_of(size, unknowns) for size in shape)
            except KeyError:  # a size that depends on the values of a tensor
                continue
            assert values == expected
            compared += 1
    assert compared > len(steps)
