"""Long convolutions of one channel run as products of frames, with the numbers of ONNX Runtime."""

import numpy as np
import pytest
from onnx_bodies import body, both, draw, either
from onnx_nets import graph, op, run

from neural_mp.adaptors.onnxrt.adaptor import OnnxRuntimeAdaptor
from neural_mp.testing import signal_to_noise

#: Decibels of two FP32 sums in another order.
EQUAL = 110


def bank(kernel=64, stride=32, length=200, bias=False, channels=1, **options):
    """A filter bank of 12 kernels, as it stands at the start of speech models."""
    weight = draw(12, channels, kernel, seed=1)
    constants = {"w": weight} | ({"b": draw(12, seed=2)} if bias else {})
    node = op("Conv", "x w b" if bias else "x w", "bank", strides=[stride], **options)
    node.name = "bank"
    return graph([node, op("Relu", "bank", "y")], {"x": ["n", channels, length]}, ["y"], constants)


def types_of(model):
    return {name: node.op_type for name, node in model.structure.nodes.items()}


def check_equal(source, feeds):
    model = OnnxRuntimeAdaptor().load(source)
    outputs = OnnxRuntimeAdaptor().predict(model, feeds)
    expected = run(source, **feeds)[0]
    output = np.asarray(outputs[0] if isinstance(outputs, list | tuple) else outputs)
    assert output.shape == expected.shape
    assert signal_to_noise(expected, output) >= EQUAL
    return types_of(model)


@pytest.mark.parametrize(("kernel", "stride"), [(64, 64), (64, 32), (64, 8), (48, 16)])
@pytest.mark.parametrize("length", [200, 192, "free"])
@pytest.mark.parametrize("bias", [False, True])
def test_the_numbers_are_those_of_the_convolution(kernel, stride, length, bias):
    source = bank(kernel, stride, length, bias)
    for samples in (1, 3):
        feeds = {"x": draw(samples, 1, 200 if length == "free" else length)}
        assert check_equal(source, feeds)["bank"] == "MatMul"


def test_a_model_of_free_length_takes_any_length():
    source = bank(length="free")
    for length in (64, 95, 96, 1000):
        check_equal(source, {"x": draw(2, 1, length)})


@pytest.mark.parametrize(
    "other",
    [
        {"stride": 24},
        {"kernel": 16, "stride": 8},
        {"stride": 4},
        {"channels": 2},
        {"pads": [1, 1]},
        {"dilations": [2]},
        {"auto_pad": "SAME_UPPER"},
    ],
)
def test_other_convolutions_stay(other):
    channels = other.get("channels", 1)
    assert check_equal(bank(**other), {"x": draw(2, channels, 200)})["bank"] == "Conv"


def test_one_that_is_an_output_keeps_its_name():
    node = op("Conv", "x w", "spectrum", strides=[32])
    source = graph([node], {"x": ["n", 1, 200]}, ["spectrum"], {"w": draw(12, 1, 64)})
    model = OnnxRuntimeAdaptor().load(source)
    assert [value.name for value in model.program.graph.outputs] == ["spectrum"]
    check_equal(source, {"x": draw(2, 1, 200)})


def test_one_in_a_branch_is_a_product_there():
    weight = draw(12, 1, 64)
    then_branch = body([op("Conv", "x w", "t", strides=[32])], [], ["t"])
    else_branch = body([op("Conv", "x w", "o", strides=[64])], [], ["o"])
    source = either(then_branch, else_branch, {"x": ["n", 1, 200]}, {"w": weight})
    for feeds in both({"x": draw(2, 1, 200)}):
        assert "Conv" not in check_equal(source, feeds).values()
