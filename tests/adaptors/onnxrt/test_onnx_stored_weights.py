"""Weights that nodes compute from what the file stores: fewer bits, repeated or carried values."""

from itertools import pairwise

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx_bodies import draw
from onnx_nets import Converted, graph, op, run

from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise

SIDE = 256
X = {"x": draw(8, SIDE, seed=2)}
W = draw(SIDE, SIDE)
BYTES = np.random.default_rng(3).integers(0, 256, (SIDE, SIDE)).astype(np.uint8)

#: Nodes that compute the weight, and what the file stores.
STORED = {
    "float16": ([op("Cast", "h", "w", to=1)], {"h": W.astype(np.float16)}),
    "bfloat16": ([op("Cast", "h", "w", to=1)], {"h": W.astype(ml_dtypes.bfloat16)}),
    "CastLike": (
        [op("CastLike", "h one", "w")],
        {"h": W.astype(np.float16), "one": np.ones(1, "f")},
    ),
    "uint8, Cast, Sub and Mul": (
        [op("Cast", "q", "f", to=1), op("Sub", "f z", "d"), op("Mul", "d s", "w")],
        {"q": BYTES, "z": np.float32(128), "s": np.float32(0.001)},
    ),
    "float16, transposed": (
        [op("Cast", "h", "f", to=1), op("Transpose", "f", "w", perm=[1, 0])],
        {"h": W.astype(np.float16)},
    ),
    "expanded": ([op("Expand", "row shape", "w")], {"row": W[:1], "shape": np.array([SIDE, SIDE])}),
    "tiled": ([op("Tile", "row times", "w")], {"row": W[:1], "times": np.array([SIDE, 1])}),
}


def size(model: onnx.ModelProto) -> int:
    return len(model.SerializeToString())


@pytest.mark.parametrize("case", STORED)
def test_a_weight_that_nodes_compute_gets_int8(case):
    nodes, constants = STORED[case]
    nodes = [*nodes, op("MatMul", "x w", "a"), op("Relu", "a", "r"), op("MatMul", "r v", "y")]
    model = graph(nodes, {"x": ["n", SIDE]}, ["y"], {**constants, "v": draw(SIDE, 8, seed=1)})
    converted = Converted(model, X)
    assert converted.kernels["MatMulIntegerToFloat"] == 2
    assert signal_to_noise(run(model, **X)[0], converted.result) > 30
    assert {"w", "f", "d"}.isdisjoint(converted.float.structure.nodes)  # no ops of the model
    mixed = Converted(model, X, a=Precision.FP32)
    assert mixed.kernels["MatMulIntegerToFloat"] == 1
    assert size(mixed.adaptor.native(mixed.model)) < size(model) + 4000  # as stored


def test_a_weight_whose_chain_reads_each_result_twice_is_followed_once():
    """Followed for every read, a chain of 40 sums has 2⁴⁰ paths, and the load does not end."""
    names = ["f", *(f"f{step}" for step in range(40)), "w"]
    doubled = [op("Add", f"{before} {before}", after) for before, after in pairwise(names)]
    nodes = [op("Cast", "h", "f", to=1), *doubled, op("MatMul", "x w", "y")]
    model = graph(nodes, {"x": ["n", SIDE]}, ["y"], {"h": (W * 2.0**-12).astype(np.float16)})
    converted = Converted(model, X)
    assert converted.kernels["DynamicQuantizeMatMul"] + converted.kernels["MatMulIntegerToFloat"]
    assert signal_to_noise(run(model, **X)[0], converted.result) > 30


def test_a_convolution_and_a_table_in_float16():
    nodes = [
        *(op("Cast", f"{name}h", f"{name}f", to=1) for name in ("w", "table")),
        op("Conv", "image wf", "c"),
        op("BatchNormalization", "c scale shift mean variance", "n"),
        op("Relu", "n", "r"),
        op("Conv", "r v", "y"),
        op("Gather", "tablef rows", "z"),
    ]
    norm = {name: np.abs(draw(128, seed=seed)) for seed, name in enumerate(("scale", "variance"))}
    constants = {
        "wh": draw(128, 64, 3, 3).astype(np.float16),
        "tableh": draw(512, SIDE).astype(np.float16),
        "v": draw(4, 128, 3, 3, seed=1),
        "shift": draw(128, seed=5),
        "mean": draw(128, seed=6),
        **norm,
    }
    model = graph(nodes, {"image": ["n", 64, 8, 8], "rows": ["k"]}, ["y", "z"], constants)
    model.graph.input[1].type.tensor_type.elem_type = TensorProto.INT64
    feeds = {"image": draw(2, 64, 8, 8, seed=9), "rows": np.array([3, 1, 511])}
    converted = Converted(model, feeds)
    assert converted.integer_convolutions == 2
    assert "BatchNormalization" not in converted.kernels
    for expected, output in zip(run(model, **feeds), converted.result, strict=True):
        assert signal_to_noise(expected, output) > 25
    assert size(converted.adaptor.native(converted.model)) < 0.6 * size(model)


def test_a_weight_that_two_ops_read_turned_is_stored_once_in_float():
    """As a table and, transposed, as the last layer of a language model."""
    nodes = [
        op("Gather", "w rows", "g"),
        op("Transpose", "w", "t", perm=[1, 0]),
        op("MatMul", "g t", "y"),
        op("MatMul", "g v", "z"),
    ]
    model = graph(nodes, {"rows": ["k"]}, ["y", "z"], {"w": draw(512, SIDE), "v": draw(SIDE, 8)})
    model.graph.input[0].type.tensor_type.elem_type = TensorProto.INT64
    mixed = Converted(model, {"rows": np.arange(9)}, g=Precision.FP32, y=Precision.FP32)
    assert mixed.kernels["MatMulIntegerToFloat"] == 1
    assert size(mixed.adaptor.native(mixed.model)) < size(model) + 2000


def carrying(kind: str, shown: bool) -> onnx.ModelProto:
    """A recurrent cell in the body of a Loop or Scan that carries its weight as a state.

    The weight is an output of the model, too, if `shown`.
    """
    nodes = [op("MatMul", "h w_in", "p"), op("Tanh", "p", "h_out"), op("Identity", "w_in", "w_out")]
    states = {"h": ["n", SIDE], "w_in": [SIDE, SIDE]}
    results = {"h_out": ["n", SIDE], "w_out": [SIDE, SIDE]}
    if kind == "Loop":
        nodes.append(op("Identity", "cond", "cond_out"))
    else:
        nodes[0] = op("MatMul", "s w_in", "p")
        nodes.insert(0, op("Add", "h step", "s"))
    for node in nodes:
        node.name = node.output[0]
    declared = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in states.items()]
    produced = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in results.items()]
    if kind == "Loop":
        count = helper.make_tensor_value_info("i", TensorProto.INT64, [])
        flags = [
            helper.make_tensor_value_info(n, TensorProto.BOOL, []) for n in ("cond", "cond_out")
        ]
        declared, produced = [count, flags[0], *declared], [flags[1], *produced]
        node = op(
            "Loop",
            "times go x w",
            "last after",
            body=helper.make_graph(nodes, "b", declared, produced),
        )
        constants = {"times": np.array(4), "go": np.array(True)}
    else:
        declared.append(helper.make_tensor_value_info("step", TensorProto.FLOAT, [SIDE]))
        body = helper.make_graph(nodes, "b", declared, produced)
        node = op("Scan", "x w steps", "last after", body=body, num_scan_inputs=1)
        constants = {"steps": draw(4, SIDE, seed=4)}
    outputs = ["y", "after"] if shown else ["y"]
    weights = {"w": W * np.float32(1.2 / 16), "v": draw(SIDE, 8, seed=1)}
    return graph(
        [node, op("MatMul", "last v", "y")], {"x": ["n", SIDE]}, outputs, {**weights, **constants}
    )


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("kind", ["Loop", "Scan"])
def test_a_weight_that_a_loop_carries_unchanged_gets_int8(kind, shown):
    model = carrying(kind, shown)
    converted = Converted(model, X)
    assert converted.float.obstacle is None
    assert converted.space.capabilities["last/p"].config(Precision.INT8) is not None
    results = converted.result if shown else [converted.result]
    expected = run(model, **X)
    assert signal_to_noise(expected[0], results[0]) > 25
    if shown:
        np.testing.assert_array_equal(expected[1], results[1])
    else:
        assert size(converted.adaptor.native(converted.model)) < 0.3 * size(model)


def test_a_state_that_a_step_changes_stays_carried():
    model = carrying("Loop", True)
    body = model.graph.node[0].attribute[0].g
    body.node[2].op_type = "Neg"
    converted = Converted(model, X)
    for expected, output in zip(run(model, **X), converted.result, strict=True):
        assert signal_to_noise(expected, output) > 25
    assert not any(np.array_equal(numpy_helper.to_array(t), W) for t in model.graph.initializer)


def test_a_weight_of_several_ops_in_int8_is_stored_once():
    """Within a Loop and before it, as tf2onnx writes recurrent layers."""
    model = carrying("Loop", False)
    model.graph.node.insert(0, op("MatMul", "x w", "first"))
    model.graph.node[0].name = "first"
    model.graph.node[1].input[2] = "first"
    converted = Converted(model, X)
    plan = converted.space.resolve(converted.space.fastest_plan()).plan
    assert plan.counts() == {Precision.INT8: 3}
    assert size(converted.adaptor.native(converted.model)) < 0.28 * size(model)
    assert signal_to_noise(run(model, **X)[0], converted.result) > 20
