"""Constructs of graphs: branches, loops, sequences, functions, foldable nodes."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper
from onnx_bodies import draw
from onnx_nets import Converted, graph, op, run

from neural_mp.adaptors.onnxrt.graph.sessions import RUNS_LAYERS_BEFORE_BRANCHES
from neural_mp.core.precision import CPU_PRECISIONS, Precision
from neural_mp.testing import signal_to_noise

INT8 = Precision.INT8

X = {"x": draw(2, 3, 8, 8, seed=2)}


def with_branches() -> onnx.ModelProto:
    """A convolution whose result is read within both branches of an If, and behind it."""

    def branch(name, kind):
        return helper.make_graph(
            [helper.make_node(kind, ["a"], [name], name=name)],
            name,
            [],
            [helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        )

    nodes = [
        op("Conv", "x w", "a"),
        op("ReduceSum", "x", "s", keepdims=0),
        op("Greater", "s zero", "c"),
        op("If", "c", "i", then_branch=branch("t", "Relu"), else_branch=branch("e", "Neg")),
        op("Conv", "i v", "y"),
    ]
    constants = {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 1, 1, seed=1), "zero": np.float32(0)}
    return graph(
        nodes, {"x": ["n", 3, 8, 8]}, ["y"], {n: np.asarray(a) for n, a in constants.items()}
    )


@pytest.mark.skipif(
    not RUNS_LAYERS_BEFORE_BRANCHES,
    reason="this ONNX Runtime ends the process at a convolution that a branch reads",
)
@pytest.mark.parametrize("precision", [p for p in CPU_PRECISIONS if p is not Precision.INT4])
def test_branches_read_what_is_converted_around_them(precision):
    model = with_branches()
    for sign in (1, -1):
        x = {"x": sign * np.abs(X["x"])}
        converted = Converted(model, x, precision)
        np.testing.assert_array_equal(converted.reference, run(model, **x)[0])
        assert signal_to_noise(converted.reference, converted.result) > 25
    if precision is INT8:
        assert converted.integer_convolutions == 2
    reasons = converted.space.capabilities["i"].reasons
    assert set(reasons) == set(CPU_PRECISIONS) - {Precision.FP32}


def test_a_loop_around_what_is_converted():
    body = helper.make_graph(
        [
            helper.make_node("Add", ["state", "a"], ["next"], name="inner add"),
            helper.make_node("Identity", ["go"], ["still"], name="inner identity"),
        ],
        "body",
        [
            helper.make_tensor_value_info("turn", TensorProto.INT64, []),
            helper.make_tensor_value_info("go", TensorProto.BOOL, []),
            helper.make_tensor_value_info("state", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
        ],
    )
    model = graph(
        [
            op("Conv", "x w", "a"),
            op("Loop", "turns - a", "l", body=body),
            op("Conv", "l v", "y"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(4, 3, 3, 3), "v": draw(5, 4, 1, 1, seed=1), "turns": np.array(3)},
    )
    converted = Converted(model, X)
    assert converted.integer_convolutions == 2
    assert signal_to_noise(converted.reference, converted.result) > 25


def test_sequences_pass_through():
    model = graph(
        [
            op("Conv", "x w", "a"),
            op("SequenceConstruct", "a x", "s"),
            op("SequenceAt", "s place", "e"),
            op("Conv", "e v", "y"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {"w": draw(3, 3, 1, 1), "v": draw(5, 3, 1, 1, seed=1), "place": np.array(0)},
    )
    converted = Converted(model, X)
    assert signal_to_noise(converted.reference, converted.result) > 25
    sixteen = Converted(model, X, Precision.BF16)
    assert signal_to_noise(sixteen.reference, sixteen.result) > 35


def test_functions_of_the_model_are_opened():
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    function = helper.make_function(
        "mine",
        "block",
        ["data", "weight"],
        ["out"],
        [
            helper.make_node("Conv", ["data", "weight"], ["inner"]),
            helper.make_node("Relu", ["inner"], ["out"]),
        ],
        opsets[:1],
    )
    graph_proto = helper.make_graph(
        [helper.make_node("block", ["x", "w"], ["y"], domain="mine")],
        "graph",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 3, 8, 8])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)],
        [onnx.numpy_helper.from_array(draw(4, 3, 3, 3), "w")],
    )
    model = helper.make_model(
        graph_proto, opset_imports=opsets, functions=[function], ir_version=10
    )
    converted = Converted(model, X)
    assert converted.kernels["QLinearConv"] == 1


def test_batch_norms_and_constants_are_folded():
    ones = np.ones(4, np.float32)
    model = graph(
        [
            op("Transpose", "flipped", "w", perm=[3, 2, 0, 1]),
            op("Conv", "x w", "a"),
            op("BatchNormalization", "a scale shift mean variance", "n"),
            op("Relu", "n", "y"),
        ],
        {"x": ["n", 3, 8, 8]},
        ["y"],
        {
            "flipped": draw(3, 3, 3, 4),
            "scale": draw(4, seed=3),
            "shift": draw(4, seed=4),
            "mean": draw(4, seed=5),
            "variance": ones * 2,
        },
    )
    converted = Converted(model, X)
    assert set(converted.space.graph.types) == {"Conv", "Relu"}
    assert converted.kernels["QLinearConv"] == 1
    assert signal_to_noise(converted.reference, converted.result) > 30
