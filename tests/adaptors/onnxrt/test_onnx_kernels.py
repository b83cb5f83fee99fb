"""Every integer pattern against whole numbers in numpy, exact to one step."""

import numpy as np
import onnx_ir as ir
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from integers import convolve, integers
from machine import CONVOLUTION, DENSE, DEPTHWISE, products_here, weight_limit_here
from onnx import numpy_helper
from onnx_nets import Converted, graph, op, run

from neural_mp.adaptors.onnxrt.kernels.registry import moves_bytes
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation
from neural_mp.core.precision import Precision
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.testing import signal_to_noise

BF16, FP16 = Precision.BF16, Precision.FP16


def draw(shape, seed, low=-1.0):
    return np.random.default_rng(seed).uniform(low, 1, shape).astype(np.float32)


def steps_of(weight, axis, kernel):
    """Whole numbers, as many as the kernel is right with here, and the step of every output."""
    axes = tuple(i for i in range(weight.ndim) if i != axis)
    limit = weight_limit_here("onnxrt", kernel)
    # In float32, as steps are stored: in more digits, what lies between two steps goes elsewhere.
    steps = (np.abs(weight).max(axis=axes) / limit).astype(np.float32)
    column = steps.reshape([-1 if i == axis else 1 for i in range(weight.ndim)])
    return np.rint(weight / column).astype(np.int64), steps.astype(np.float64)


def assert_one_step_off_at_most(result, expected, step):
    assert np.abs(result - expected).max() <= step * 1.01
    assert (np.abs(result - expected) < step * 0.51).mean() > 0.95


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(1, 1), (3, 1), (3, 2), (5, 1)]),
    st.sampled_from([1, 2, 8]),
    st.integers(0, 2),
    st.sampled_from([1, 2]),
    st.sampled_from([None, "Relu", "Clip"]),
    st.booleans(),
)
def test_a_convolution(seed, window, groups, padding, stride, activation, biased):
    kernel, dilation = window
    # A product with float output, see the test of pointwise convolutions.
    assume((kernel, groups, padding, stride, activation) != (1, 1, 0, 1, None))
    weight = draw((8, 8 // groups, kernel, kernel), seed)
    bias = draw((8,), seed + 1)
    nodes = [
        op(
            "Conv",
            "x w b" if biased else "x w",
            "conv" if activation else "y",
            group=groups,
            pads=[padding] * 4,
            strides=[stride] * 2,
            dilations=[dilation] * 2,
        )
    ]
    if activation:
        nodes.append(op(activation, "conv low high" if activation == "Clip" else "conv", "y"))
    constants = {"w": weight, "b": bias, "low": np.float32(-0.5), "high": np.float32(1.5)}
    constants = {name: np.asarray(value) for name, value in constants.items()}
    used = {name for node in nodes for name in node.input}
    x = draw((2, 8, 11, 9), seed + 2, low=-0.3)
    model = graph(
        nodes, {"x": ["n", 8, 11, 9]}, ["y"], {n: a for n, a in constants.items() if n in used}
    )
    converted = Converted(model, {"x": x})
    assert converted.kernels["QLinearConv"] == 1
    assert not {"Conv", "FusedConv", "Clip", "Relu"} & set(converted.kernels)

    scale, zero = converted.scale("x")
    whole, steps = steps_of(weight, 0, DEPTHWISE if groups == 8 else CONVOLUTION)
    sums = convolve(integers(x, scale, zero) - zero, whole, stride, padding, dilation, groups)
    exact = sums * (scale * steps).reshape(1, -1, 1, 1)
    if biased:
        exact = exact + bias.reshape(1, -1, 1, 1)
    limits = {"Relu": (0, np.inf), "Clip": (-0.5, 1.5)}.get(activation, (-np.inf, np.inf))
    step, written_zero = converted.scale("y")
    stored = integers(np.clip(exact, *limits), step, written_zero)
    assert_one_step_off_at_most(converted.result, (stored - written_zero) * step, step)


@pytest.mark.parametrize("shape", [(2, 3, 30), (2, 3, 6, 7), (1, 3, 6, 7, 5)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_pointwise_convolution_read_in_float_is_not_rounded(shape, biased):
    weight, bias = draw((4, 3), 0), draw((4,), 1)
    constants = {"w": weight.reshape(4, 3, *[1] * (len(shape) - 2))}
    constants |= {"b": bias} if biased else {}
    model = graph(
        [op("Conv", " ".join(["x", *constants]), "y")], {"x": list(shape)}, ["y"], constants
    )
    x = draw(shape, 2)
    converted = Converted(model, {"x": x})
    assert converted.kernels["MatMulIntegerToFloat"] == 1
    assert not {"QLinearConv", "Conv", "DequantizeLinear"} & set(converted.kernels)
    scale, zero = converted.scale("x")
    whole, steps = steps_of(weight, 0, DENSE)
    sums = np.einsum("nc...,kc->nk...", integers(x, scale, zero) - zero, whole)
    across = [-1, *[1] * (len(shape) - 2)]
    exact = sums * (scale * steps).reshape(across) + (bias.reshape(across) if biased else 0)
    np.testing.assert_allclose(converted.result, exact, atol=1e-5)


@pytest.mark.parametrize("branches", [("Conv", "stem"), ("Conv", "Conv"), ("Conv", "Resize")])
def test_a_sum_of_convolutions_that_is_read_in_float_runs_in_integers(branches):
    constants = {"w": draw((8, 3, 3, 3), 0), "sizes": np.array([1, 8, 6, 7])}
    nodes = [op("Conv", "x w", "c", pads=[1, 1, 1, 1]), op("Relu", "c", "stem")]
    for index, kind in enumerate(branches):
        constants[f"w{index}"] = draw((8, 8, 1, 1), 1 + index)
        if kind != "stem":
            nodes.append(op("Conv", f"stem w{index}", f"b{index}"))
        if kind == "Resize":
            nodes.append(op("Resize", f"b{index} - - sizes", "up", mode="nearest"))
    names = {"stem": "stem", "Conv": "b{}", "Resize": "up"}
    left, right = (names[kind].format(index) for index, kind in enumerate(branches))
    nodes += [op("Add", f"{left} {right}", "sum"), op("Relu", "sum", "y")]
    x = draw((1, 3, 6, 7), 5)
    converted = Converted(graph(nodes, {"x": [1, 3, 6, 7]}, ["y"], constants), {"x": x})
    assert converted.kernels["QLinearAdd"] == 1
    assert converted.kernels["DequantizeLinear"] == 1
    assert not {"Add", "Relu", "Conv", "MatMulIntegerToFloat"} & set(converted.kernels)
    assert signal_to_noise(converted.reference, converted.result) > 30


@pytest.mark.parametrize("keepdims", [0, 1])
def test_the_mean_of_an_image_is_an_integer_pooling(keepdims):
    weight, axes = draw((8, 4, 3, 3), 0), np.array([-1, 2])
    nodes = [
        op("Conv", "x w", "a"),
        op("ReduceMean", "a axes", "mean", keepdims=keepdims),
        op("Identity", "mean", "y"),
    ]
    x = draw((3, 4, 8, 8), 1)
    model = graph(nodes, {"x": ["n", 4, 8, 8]}, ["y"], {"w": weight, "axes": axes})
    converted = Converted(model, {"x": x})
    assert converted.kernels["QLinearGlobalAveragePool"] == 1
    assert "ReduceMean" not in converted.kernels
    shape = (3, 8, 1, 1) if keepdims else (3, 8)
    assert converted.result.shape == converted.reference.shape == shape
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_the_mean_of_an_image_does_not_overflow_fp16():
    x = np.full((1, 2, 16, 16), 3e4, np.float32)
    mean = op("ReduceMean", "x axes", "y", keepdims=0)
    model = graph([mean], {"x": list(x.shape)}, ["y"], {"axes": np.array([2, 3])})
    converted = Converted(model, {"x": x}, Precision.FP16)
    np.testing.assert_allclose(converted.result, 3e4, rtol=1e-3)


@pytest.mark.parametrize("shape", [(2, 3, 30), (1, 3, 6, 7, 5)])
def test_convolutions_in_one_and_three_dimensions(shape):
    weight = draw((4, 3, *[3] * (len(shape) - 2)), 0)
    model = graph([op("Conv", "x w", "y")], {"x": list(shape)}, ["y"], {"w": weight})
    converted = Converted(model, {"x": draw(shape, 1)})
    assert converted.kernels["QLinearConv"] == 1
    assert signal_to_noise(converted.reference, converted.result) > 35


@pytest.mark.slow
@settings(max_examples=40)
@given(
    st.integers(0, 10**6),
    st.sampled_from([(5,), (2, 5), (3, 1, 4)]),
    st.booleans(),
    st.booleans(),
)
def test_a_product_with_a_matrix(seed, rows, biased, fixed):
    weight, bias = draw((16, 12), seed), draw((12,), seed + 1)
    nodes = [op("MatMul", "x w", "product" if biased else "y")]
    if biased:
        nodes.append(op("Add", "product b", "y"))
    x = draw((*rows, 16), seed + 2, low=-0.2)
    # Of known sizes, ONNX Runtime would make a float product with a bias of the two.
    shape = [*rows, 16] if fixed else ["n", *rows[1:], 16]
    constants = {"w": weight, "b": bias} if biased else {"w": weight}
    converted = Converted(graph(nodes, {"x": shape}, ["y"], constants), {"x": x})
    assert converted.kernels == {"QuantizeLinear": 1, "MatMulIntegerToFloat": 1}

    scale, zero = converted.scale("x")
    whole, steps = steps_of(weight, 1, DENSE)
    expected = (integers(x, scale, zero) - zero) @ whole * (scale * steps)
    if biased:
        expected = expected + bias
    difference = np.abs(converted.result - expected)
    # Not to a step, to a rounding error of float32; but an input may lie between two steps, and
    # puts the outputs of its row off.
    assert (difference >= 1e-5).any(-1).sum() <= 1
    assert difference.max() < 3 * scale


@pytest.mark.parametrize("transposed", [0, 1])
@pytest.mark.parametrize("added", [None, "scalar", "row", "matrix"])
def test_a_dense_layer_with_its_factors(transposed, added):
    weight = draw((12, 16) if transposed else (16, 12), 0)
    values = {"scalar": draw((1,), 1), "row": draw((12,), 1), "matrix": draw((1, 12), 1)}
    constants = {"w": weight, **({"c": values[added]} if added else {})}
    node = op("Gemm", "x w c" if added else "x w", "y", alpha=0.5, beta=2.0, transB=transposed)
    x = draw((7, 16), 2)
    converted = Converted(graph([node], {"x": ["n", 16]}, ["y"], constants), {"x": x})
    assert converted.kernels == {"QuantizeLinear": 1, "MatMulIntegerToFloat": 1}
    matrix = weight.T if transposed else weight
    bias = 2.0 * values[added] if added else 0.0
    assert signal_to_noise(0.5 * x @ matrix + bias, converted.result) > 40


JOINING = {
    "Add": (op("Add", "a b", "join"), lambda a, b: a + b),
    "Mul": (op("Mul", "a b", "join"), lambda a, b: a * b),
    "Concat": (op("Concat", "a b", "join", axis=1), lambda a, b: np.concatenate([a, b], 1)),
    "AveragePool": (
        op("AveragePool", "a", "join", kernel_shape=[2, 2], strides=[2, 2]),
        lambda a, b: a.reshape(*a.shape[:2], 4, 2, 4, 2).mean((3, 5)),
    ),
    "GlobalAveragePool": (
        op("GlobalAveragePool", "a", "join"),
        lambda a, b: a.mean((2, 3), keepdims=True),
    ),
    "Sigmoid": (op("Sigmoid", "a", "join"), lambda a, b: 1 / (1 + np.exp(-a))),
    "LeakyRelu": (op("LeakyRelu", "a", "join", alpha=0.1), lambda a, b: np.maximum(a, 0.1 * a)),
    "HardSigmoid": (
        op("HardSigmoid", "a", "join", alpha=0.3, beta=0.4),
        lambda a, b: np.clip(0.3 * a + 0.4, 0, 1),
    ),
}
#: The kernels with another name than their op.
KERNELS = {"HardSigmoid": "QLinearAdd"}


@pytest.mark.parametrize("kind", JOINING)
def test_an_op_between_integers_with_scales_of_its_own(kind):
    """Two convolutions before, one behind; all of it in integers."""
    node, function = JOINING[kind]
    channels = 16 if kind == "Concat" else 8
    model = graph(
        [
            op("Conv", "x w", "a", kernel_shape=[1, 1]),
            op("Conv", "x v", "b", kernel_shape=[1, 1]),
            node,
            op("Conv", "join u", "y", kernel_shape=[1, 1]),
        ],
        {"x": ["n", 4, 8, 8]},
        ["y", "join"],
        {
            "w": draw((8, 4, 1, 1), 0),
            "v": draw((8, 4, 1, 1), 1),
            "u": draw((8, channels, 1, 1), 2),
        },
    )
    converted = Converted(model, {"x": draw((3, 4, 8, 8), 3)})
    assert KERNELS.get(kind, f"QLinear{kind}") in converted.kernels
    assert kind not in converted.kernels

    x = draw((3, 4, 8, 8), 3)
    scale, zero = converted.scale("x")
    x = (integers(x, scale, zero) - zero) * scale
    parts = []
    for weight, name in ((draw((8, 4, 1, 1), 0), "a"), (draw((8, 4, 1, 1), 1), "b")):
        whole, steps = steps_of(weight, 0, CONVOLUTION)
        exact = np.einsum("nchw,oc->nohw", x, (whole * steps.reshape(-1, 1, 1, 1))[:, :, 0, 0])
        if name in converted.observed.ranges:  # what nothing reads is never stored
            step, middle = converted.scale(name)
            exact = (integers(exact, step, middle) - middle) * step
        parts.append(exact)
    step, middle = converted.scale("join")
    expected = (integers(function(*parts), step, middle) - middle) * step
    assert_one_step_off_at_most(converted.result[1], expected, step)


MOVING = {
    "MaxPool": op("MaxPool", "a", "moved", kernel_shape=[2, 2], strides=[2, 2]),
    "Reshape": op("Reshape", "a shape", "moved"),
    "Transpose": op("Transpose", "a", "moved", perm=[0, 1, 3, 2]),
    "Slice": op("Slice", "a starts ends", "moved"),
    "Gather": op("Gather", "a places", "moved", axis=2),
    "Tile": op("Tile", "a times", "moved"),
    "DepthToSpace": op("DepthToSpace", "a", "moved", blocksize=2),
    "SpaceToDepth": op("SpaceToDepth", "a", "moved", blocksize=2),
    "Pad": op("Pad", "a pads", "moved"),
    "Pad reflect": op("Pad", "a pads", "moved", mode="reflect"),
    "Resize": op(
        "Resize",
        "a - scales",
        "moved",
        mode="nearest",
        coordinate_transformation_mode="asymmetric",
        nearest_mode="floor",
    ),
    "Split": op("Split", "a", "moved other", axis=1, num_outputs=2),
}


@pytest.mark.parametrize("kind", MOVING)
def test_what_moves_integers_changes_none(kind):
    node = MOVING[kind]
    if not moves_bytes(ir.from_proto(node), 20):
        pytest.skip(f"this ONNX Runtime has no kernel of {kind} in uint8")
    channels = {"DepthToSpace": 2, "SpaceToDepth": 32, "Split": 4}.get(kind, 8)
    constants = {
        "w": draw((8, 4, 1, 1), 0),
        "u": draw((8, channels, 1, 1), 2),
        "shape": np.array([0, 8, 4, -1]),
        "starts": np.array([0, 0, 1, 2]),
        "ends": np.array([9, 8, 7, 8]),
        "places": np.array([3, 0, 3]),
        "times": np.array([1, 1, 2, 1]),
        "pads": np.array([0, 0, 1, 2, 0, 0, 0, 1]),
        "scales": np.array([1, 1, 2, 2], np.float32),
    }
    nodes = [
        op("Conv", "x w", "a", kernel_shape=[1, 1]),
        op(node.op_type, " ".join(name or "-" for name in node.input), " ".join(node.output)),
        op("Conv", "moved u", "y", kernel_shape=[1, 1]),
    ]
    nodes[1].attribute.extend(node.attribute)
    used = {name for proto in nodes for name in proto.input}
    model = graph(
        nodes,
        {"x": ["n", 4, 8, 8]},
        ["y", "a", "moved"],
        {name: array for name, array in constants.items() if name in used},
    )
    x = draw((3, 4, 8, 8), 3)
    converted = Converted(model, {"x": x})
    assert converted.integer_convolutions == 2
    assert converted.kernels["QuantizeLinear"] == 1
    _, original, moved = converted.result
    # The op itself, by ONNX Runtime in float, on what the first convolution wrote.
    single = graph(
        [nodes[1]],
        {"a": list(original.shape)},
        ["moved"],
        {name: array for name, array in constants.items() if name in nodes[1].input},
    )
    np.testing.assert_allclose(moved, run(single, a=original)[0], atol=1e-6)


def test_unsigned_weights_have_the_full_range_and_are_exact_everywhere():
    model = graph(
        [op("Conv", "x w b", "a"), op("Flatten", "a", "f"), op("Gemm", "f v", "y")],
        {"x": ["n", 4, 5, 5]},
        ["y"],
        {"w": draw((8, 4, 3, 3), 0), "b": draw((8,), 1), "v": draw((72, 6), 2)},
    )
    data = {"x": draw((3, 4, 5, 5), 3)}
    unsigned = Converted(model, data, weight=QuantSpec("uint8", "symmetric", "per_channel"))
    assert unsigned.kernels["QLinearConv"] == 1
    stored = {t.name: t for t in unsigned.adaptor.native(unsigned.model).graph.initializer}
    weights = [numpy_helper.to_array(t) for n, t in stored.items() if n.endswith("weight/uint8")]
    assert [w.dtype for w in weights] == [np.uint8, np.uint8]
    assert {int(w.min()) for w in weights} | {int(w.max()) for w in weights} == {1, 255}
    assert signal_to_noise(unsigned.reference, unsigned.result) > 35
    assert not unsigned.adaptor.portability.full_range_kernels(unsigned.model)
    if products_here("onnxrt", CONVOLUTION) is Int8Accumulation.EXACT:
        np.testing.assert_allclose(unsigned.result, Converted(model, data).result, atol=1e-5)


def test_a_processor_without_exact_products_gets_weights_of_63():
    weight = draw((8, 4, 3, 3), 0)
    model = graph([op("Conv", "x w", "y")], {"x": ["n", 4, 5, 5]}, ["y"], {"w": weight})
    hardware = Hardware("without", frozenset({"avx2"}), 2)
    converted = Converted(model, {"x": draw((3, 4, 5, 5), 3)}, machine=hardware)
    stored = {t.name: t for t in converted.adaptor.native(converted.model).graph.initializer}
    (integers_of,) = (
        numpy_helper.to_array(t) for n, t in stored.items() if n.endswith("weight/int8")
    )
    assert np.abs(integers_of).max() == 63
    assert converted.kernels["QLinearConv"] == 1


def test_bf16_is_that_of_the_inputs_weights_and_results():
    """A product in 16 bits: its factors and its result are rounded, sums are not."""
    weight, x = draw((16, 12), 0), draw((5, 16), 1)
    model = graph([op("MatMul", "x w", "y")], {"x": ["n", 16]}, ["y"], {"w": weight})
    converted = Converted(model, {"x": x}, Precision.BF16)

    def unit(values):
        return 2.0 ** (np.floor(np.log2(np.abs(values))) - 7)

    def rounded(values):
        return np.rint(values / unit(values)) * unit(values)

    exact = rounded(x.astype(np.float64)) @ rounded(weight.astype(np.float64))
    assert (np.abs(converted.result - rounded(exact)) <= unit(exact) * 1.01).all()
    assert (converted.result == rounded(exact)).mean() > 0.9


def test_fp16_is_no_further_from_fp32_than_its_rounding():
    """ONNX Runtime computes it in FP32 here, and rounds weights and results, some of them."""
    weight, x = draw((16, 12), 0), draw((5, 16), 1)
    model = graph([op("MatMul", "x w", "y")], {"x": ["n", 16]}, ["y"], {"w": weight})
    converted = Converted(model, {"x": x}, Precision.FP16)
    bound = 3 * 2.0**-11 * (np.abs(x) @ np.abs(weight))
    assert (np.abs(converted.result - x @ weight) <= bound).all()
    assert converted.result.dtype == np.float32
