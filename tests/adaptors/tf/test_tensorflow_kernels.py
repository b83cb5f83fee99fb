"""Every fused integer pattern against whole numbers in numpy, exact to one step."""

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import example, given, settings
from hypothesis import strategies as st
from integer_reference import (
    Scale,
    convolution,
    depthwise,
    padding_of,
    quantized_weight,
)
from machine import CONVOLUTION, DENSE, DEPTHWISE, examples, machine, weight_limit_here
from scipy import special
from ties import near_tie, off_ties

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.graph.fusion import rounds_averages
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, import_graph
from neural_mp.adaptors.tensorflow.graph.tensor_graph import make_node
from neural_mp.core.int8_accumulation import KernelKind
from neural_mp.core.precision import Precision
from neural_mp.profiling.audit import audit_ops
from neural_mp.space import list_effective_ops
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8

MACHINE = machine()
LIMITS = {kernel: weight_limit_here("tensorflow", kernel) for kernel in KernelKind}
ACTIVATIONS = {
    None: lambda x: x,
    "Relu": lambda x: np.maximum(x, 0),
    "Relu6": lambda x: np.clip(x, 0, 6),
    "Tanh": np.tanh,
    "Sigmoid": special.expit,
    "Elu": lambda x: np.where(x > 0, x, np.expm1(x)),
    "Gelu": lambda x: 0.5 * x * (1 + special.erf(x / np.sqrt(2))),
    "approximate Gelu": lambda x: (
        0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    ),
}


def activated(x, name):
    if name is None:
        return x
    if "elu" in name and name.endswith("Gelu"):
        return tf.nn.gelu(x, approximate=name != "Gelu")
    return getattr(tf.nn, name.lower())(x) if name != "Tanh" else tf.tanh(x)


class Converted:
    """A graph all in INT8, with the ranges it was calibrated to on the same data."""

    def __init__(self, graph: tf.Graph, data: np.ndarray) -> None:
        self.adaptor = TensorFlowAdaptor()
        self.float = self.adaptor.load(graph, outputs=["out"])
        space = self.adaptor.space(self.float, MACHINE)
        self.observations = self.adaptor.observe(self.float, [data], space)
        plan = space.resolve(uniform(space, INT8))
        self.model = self.adaptor.convert(self.float, plan, self.observations, space)
        ran = self.adaptor.trace_kernels(self.model, data)
        assert not audit_ops(list_effective_ops(space, plan), ran, lambda _: False).findings
        self.ops = [node.op for node in self.model.graph.nodes.values()]
        self.result = self.adaptor.predict(self.model, data)

    def range(self, tensor: str) -> tuple[float, float]:
        return self.observations.ranges[tensor]["minmax"]


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("kernel", [1, 3])
@pytest.mark.parametrize("stride", [1, 2, 4])
@pytest.mark.parametrize("channels", [4, 16])
def test_a_kernel_meets_inputs_of_all_sizes(signed, kernel, stride, channels):
    """It keeps its weights in the order that suits the first input it meets.

    With int8 for inputs it went on with that order where a later input wanted another.
    """
    case = {"size": (32, 32), "channels": channels, "signed": signed, "activation": None}
    weight = data_for((kernel, kernel, channels, 8), 0)
    graph = conv_graph(case, lambda x: tf.nn.conv2d(x, weight, stride, "SAME"), open_sizes=True)
    converted = Converted(graph, data_for((8, 32, 32, channels), 0))
    for shape in ((1, 7, 7), (1, 64, 64), (1, 9, 100), (3, 8, 8), (1, 1, 3), (16, 14, 14)):
        data = data_for((*shape, channels), 1)
        expected = converted.adaptor.predict(converted.float, data)
        assert signal_to_noise(expected, converted.adaptor.predict(converted.model, data)) > 20


def data_for(shape, seed) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def inputs_of(case) -> np.ndarray:
    """Numbers that float32 and float64 round to the same step."""
    data = data_for((case["batch"], *case["size"], case["channels"]), case["seed"])
    values = data if case["signed"] else np.abs(data)
    return np.copysign(off_ties(values, Scale.of(values.min(), values.max()).step), data)


geometry = st.fixed_dictionaries(
    {
        "size": st.tuples(st.integers(3, 9), st.integers(3, 9)),
        "channels": st.sampled_from([1, 3, 8, 17, 32]),
        "kernel": st.tuples(st.integers(1, 3), st.integers(1, 3)),
        "stride": st.integers(1, 2),
        "padding": st.sampled_from(["SAME", "VALID", "PAD"]),
        "signed": st.booleans(),
        "bias": st.booleans(),
        "activation": st.sampled_from([None, "Relu", "Relu6"]),
        "batch": st.integers(1, 3),
        "seed": st.integers(0, 2**16),
    }
)


def conv_graph(case, build, residual: bool = False, open_sizes: bool = False):
    """Input (non-negative where asked for), layer, bias, residual, activation."""
    graph = tf.Graph()
    with graph.as_default():
        sizes = (None, None) if open_sizes else case["size"]
        shape = [None, *sizes, case["channels"]]
        x = tf.compat.v1.placeholder(tf.float32, shape, name="x")
        x = x if case["signed"] else tf.abs(x, name="positive")
        y = build(x)
        if residual:
            y = y + tf.identity(build(x, "beside"))
        y = activated(y, case["activation"])
        tf.identity(y, name="out")
    return graph


def source_scale(case, converted) -> Scale:
    return Scale.of(*converted.range("x" if case["signed"] else "positive"))


def pads_of(case, dilation=1):
    if case["padding"] == "PAD":
        return [(1, 1), (0, 2)]
    return [
        padding_of(size, window, case["stride"], dilation, case["padding"])
        for size, window in zip(case["size"], case["kernel"], strict=True)
    ]


def explicit(case, x):
    if case["padding"] != "PAD":
        return x, case["padding"]
    return tf.pad(x, [[0, 0], [1, 1], [0, 2], [0, 0]]), "VALID"


def check(converted, exact: np.ndarray, output: Scale, slack: np.ndarray | float = 0.0) -> None:
    """The very step; one beside it where the number lies between two.

    `slack` is by how many steps of the output a summand may differ that itself lies between two.
    """
    expected = output.real(np.clip(np.rint(exact / output.step) + output.zero, 0, 255))
    error = np.abs(converted.result - expected) / output.step
    assert (error - slack).max() <= 1.001
    assert error[~(near_tie(exact, output.step) | (slack > 0))].max(initial=0) < 0.01


@given(case=geometry)
@settings(max_examples=examples(16))
def test_convolutions(case):
    draw = np.random.default_rng(case["seed"])
    outputs = int(draw.integers(1, 20))
    weight = draw.standard_normal((*case["kernel"], case["channels"], outputs)).astype(np.float32)
    bias = draw.standard_normal(outputs).astype(np.float32) * case["bias"]

    def build(x):
        x, padding = explicit(case, x)
        y = tf.nn.conv2d(x, weight, case["stride"], padding)
        return tf.nn.bias_add(y, bias) if case["bias"] else y

    data = inputs_of(case)
    converted = Converted(conv_graph(case, build), data)
    assert converted.ops.count("_FusedQuantizedConv2D") == 1
    assert not {"Conv2D", "BiasAdd", "Relu", "Relu6"} & set(converted.ops)

    pads = pads_of(case)
    scale = source_scale(case, converted)
    real = data if case["signed"] else np.abs(data)
    whole = scale.quantized(real) - scale.zero
    integers, steps = quantized_weight(weight.astype(np.float64), (0, 1, 2), LIMITS[CONVOLUTION])
    sums = convolution(whole, integers, case["stride"], 1, pads)
    exact = ACTIVATIONS[case["activation"]](sums * scale.step * steps + bias)
    check(converted, exact, Scale.of(*converted.range(tail(converted))))


def tail(converted) -> str:
    """The tensor the kernel writes: what the output passes on."""
    (source,) = [
        node.input[0] for node in converted.float.graph.nodes.values() if node.name == "out"
    ]
    return source


@given(case=geometry)
@settings(max_examples=examples(12))
def test_depthwise_convolutions(case):
    draw = np.random.default_rng(case["seed"])
    kernel, stride = case["kernel"][0], case["stride"]
    case = {**case, "kernel": (kernel, kernel)}
    if case["padding"] == "PAD":
        case["padding"] = "SAME"
    multiplier = int(draw.integers(1, 3))
    weight = draw.standard_normal((kernel, kernel, case["channels"], multiplier))
    weight = weight.astype(np.float32)
    bias = draw.standard_normal(case["channels"] * multiplier).astype(np.float32) * case["bias"]

    def build(x):
        y = tf.nn.depthwise_conv2d(x, weight, [1, stride, stride, 1], case["padding"])
        return tf.nn.bias_add(y, bias) if case["bias"] else y

    data = inputs_of(case)
    converted = Converted(conv_graph(case, build), data)
    assert converted.ops.count("_FusedQuantizedDepthwiseConv2D") == 1

    scale = source_scale(case, converted)
    real = data if case["signed"] else np.abs(data)
    whole = scale.quantized(real) - scale.zero
    kernel = DEPTHWISE if weight.shape[3] == 1 else CONVOLUTION
    integers, steps = quantized_weight(weight.astype(np.float64), (0, 1), LIMITS[kernel])
    sums = depthwise(whole, integers, stride, 1, pads_of(case))
    exact = ACTIVATIONS[case["activation"]](sums * scale.step * steps + bias)
    check(converted, exact, Scale.of(*converted.range(tail(converted))))


#: A step of the summand is wider than one of the output, whose negative half is cut off.
WIDE_SUMMAND = {
    "size": (9, 9),
    "channels": 17,
    "kernel": (2, 3),
    "stride": 1,
    "padding": "SAME",
    "signed": False,
    "bias": False,
    "activation": "Relu",
    "batch": 3,
    "seed": 65535,
}


@given(case=geometry)
@example(case=WIDE_SUMMAND)
@settings(max_examples=examples(12))
def test_residual_sums(case):
    """The summand is a convolution of the same input; with and without an activation behind."""
    draw = np.random.default_rng(case["seed"])
    case = {**case, "padding": "SAME"}
    outputs = int(draw.integers(1, 20))
    shape = (*case["kernel"], case["channels"], outputs)
    weights = {name: draw.standard_normal(shape).astype(np.float32) for name in ("", "beside")}
    biases = {name: draw.standard_normal(outputs).astype(np.float32) for name in weights}

    def build(x, name=""):
        y = tf.nn.conv2d(x, weights[name], case["stride"], "SAME")
        return tf.nn.bias_add(y, biases[name], name=f"bias_{name}")

    data = inputs_of(case)
    converted = Converted(conv_graph(case, build, residual=True), data)
    assert converted.ops.count("_FusedQuantizedConv2D") == 2
    assert not {"Conv2D", "AddV2", "Relu"} & set(converted.ops)

    scale = source_scale(case, converted)
    real = data if case["signed"] else np.abs(data)
    whole = scale.quantized(real) - scale.zero
    exact = {}
    for name, weight in weights.items():
        integers, steps = quantized_weight(
            weight.astype(np.float64), (0, 1, 2), LIMITS[CONVOLUTION]
        )
        sums = convolution(whole, integers, case["stride"], 1, pads_of(case))
        exact[name] = sums * scale.step * steps + biases[name]
    # Of the two, the one that comes first is stored and added by the kernel of the other.
    (summand,) = [
        name for name in ("bias_", "bias_beside") if name in converted.observations.ranges
    ]
    stored = Scale.of(*converted.range(summand))
    first = summand.removeprefix("bias_")
    (second,) = set(weights) - {first}
    added = stored.real(stored.quantized(exact[first]))
    result = ACTIVATIONS[case["activation"]](exact[second] + added)
    output = Scale.of(*converted.range(tail(converted)))
    slack = near_tie(exact[first], stored.step) * stored.step / output.step
    check(converted, result, output, slack)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("stored", [False, True])
def test_products(activation, stored):
    """A dense layer, its result as floats or (read by another one) as whole numbers."""
    draw = np.random.default_rng(0)
    weight = draw.standard_normal((24, 40)).astype(np.float32) / 4
    bias = draw.standard_normal(40).astype(np.float32)
    again = draw.standard_normal((40, 6)).astype(np.float32)
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 24], name="x")
        y = activated(tf.nn.bias_add(tf.matmul(x, weight), bias), activation)
        if stored:
            y = tf.matmul(y, again)
        tf.identity(y, name="out")
    data = data_for((50, 24), 1)
    converted = Converted(graph, data)
    assert converted.ops.count("_QuantizedMatMul") == 1 + stored
    assert converted.ops.count("QuantizeV2") == 1
    assert not {"MatMul", "BiasAdd", "Erf", "Erfc", "Tanh", "Relu", "Mul"} & set(converted.ops)

    def layer(real, scale, weight):
        integers, steps = quantized_weight(weight.astype(np.float64), (0,), LIMITS[DENSE])
        return (scale.quantized(real) - scale.zero) @ integers * (scale.step * steps)

    result = ACTIVATIONS[activation](layer(data, Scale.of(*converted.range("x")), weight) + bias)
    if stored:
        (between,) = set(converted.observations.ranges) - {"x"}
        scale = Scale.of(*converted.range(between))
        expected = layer(result, scale, again)
        # One step of what is between, in one of 40 places, is what rounding may differ by.
        limit = 2 * scale.step * np.abs(again).max()
        assert np.abs(converted.result - expected).max() < limit
    else:
        np.testing.assert_allclose(converted.result, result, atol=2e-5 * np.abs(result).max())


AGNOSTIC = {
    "max pooling": lambda x: tf.nn.max_pool2d(x, 3, 2, "SAME"),
    "average pooling": lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"),
    "average pooling at borders": lambda x: tf.nn.avg_pool2d(x, 3, 1, "SAME"),
    "padding": lambda x: tf.pad(x, [[0, 0], [1, 2], [0, 3], [0, 0]]),
    "padding of channels": lambda x: tf.pad(x, [[0, 0], [0, 0], [0, 0], [1, 0]]),
    "concatenation": lambda x: tf.concat([x, x[:, :, :2]], 2),
    "slicing": lambda x: x[:, 1:-1, ::2],
    "transposing": lambda x: tf.transpose(x, [0, 2, 1, 3]),
    "space to depth": lambda x: tf.nn.space_to_depth(x, 2),
    "depth to space": lambda x: tf.nn.depth_to_space(x, 2),
    "upsampling": lambda x: tf.compat.v1.image.resize_nearest_neighbor(x, [16, 16]),
    "reshaping": lambda x: tf.reshape(x, [-1, 4, 16, 8]),
}


@pytest.mark.parametrize("channels", [3, 4, 8])
@pytest.mark.parametrize("carrier", AGNOSTIC)
def test_what_passes_integers_on_changes_none(carrier, channels):
    """Between two convolutions, on numbers with a zero point: the same as the float op on them."""
    if channels != 8 and carrier in ("depth to space", "reshaping"):
        channels = 8
    move = AGNOSTIC[carrier]
    weight = data_for((1, 1, 2, channels), 0)
    graph = tf.Graph()
    with graph.as_default():
        x = tf.compat.v1.placeholder(tf.float32, [None, 8, 8, 2], name="x")
        first = tf.nn.conv2d(x, weight, 1, "SAME", name="first")
        moved = tf.identity(move(first))
        tf.nn.conv2d(moved, data_for((2, 2, moved.shape[3], 4), 1), 1, "VALID", name="second")
        tf.identity(graph.get_tensor_by_name("second:0"), name="out")
    data = data_for((3, 8, 8, 2), 2)
    converted = Converted(graph, data)
    assert converted.ops.count("_FusedQuantizedConv2D") == 2
    if "average" in carrier and not rounds_averages():
        assert "QuantizedAvgPool" not in converted.ops
        return
    assert converted.ops.count("QuantizeV2") == 1

    nodes = converted.model.graph.copy_graph()
    tensors = {"before": "first/uint8", "behind": nodes["second/uint8"].input[0]}
    for name, stored in tensors.items():
        nodes.add_node(make_node("Bitcast", name, [stored], T=tf.quint8, type=tf.uint8))
    fetched = Runner(import_graph(nodes.to_graph_def()))({"x": data}, list(tensors))
    inputs, outputs = (np.asarray(part).astype(np.float32) for part in fetched)
    # What moves numbers has their scale; what is joined shares one that holds all of them.
    joined = set(converted.observations.ranges) - {"x", "second"}
    ranges = [converted.range(t) for t in (joined if carrier == "concatenation" else {"first"})]
    zero = Scale.of(min(low for low, _ in ranges), max(high for _, high in ranges)).zero
    expected = move(tf.constant(inputs - zero)).numpy() + zero
    assert outputs.shape == expected.shape
    error = np.abs(outputs - expected).max()
    assert error <= (0.501 if "average" in carrier else 0)
