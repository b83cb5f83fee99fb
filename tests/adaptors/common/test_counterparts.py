"""Ops of one model in two frameworks are paired by what they compute and read."""

from __future__ import annotations

from neural_mp.adaptors.openvino.ops import TYPES as THERE
from neural_mp.adaptors.tensorflow.graph.ops import TYPES as HERE
from neural_mp.adaptors.transfer import KnownKinds, match_ops
from neural_mp.core.graph import Op, OpGraph


def source(*ops: Op) -> KnownKinds:
    return KnownKinds(OpGraph(ops, ["x"], [ops[-1].name]), HERE)


def target(*ops: Op) -> KnownKinds:
    return KnownKinds(OpGraph(ops, ["x"], [ops[-1].name]), THERE)


def test_a_chain_is_read_backwards_and_folded_and_moved_ops_are_passed_over():
    original = source(
        Op("conv", "Conv2D", ("x",)),
        Op("bias", "BiasAdd", ("conv",)),
        Op("norm/mul", "Mul", ("bias",)),
        Op("norm/add", "AddV2", ("norm/mul",)),
        Op("relu", "Relu", ("norm/add",)),
        Op("flat", "Reshape", ("relu",)),
        Op("head", "MatMul", ("flat",)),
        Op("out", "Identity", ("head",)),
    )
    converted = target(
        Op("Transpose_1", "Transpose", ("x",)),
        Op("Convolution_2", "Convolution", ("Transpose_1",)),
        Op("Add_3", "Add", ("Convolution_2",)),
        Op("Relu_4", "Relu", ("Add_3",)),
        Op("Transpose_5", "Transpose", ("Relu_4",)),
        Op("Reshape_6", "Reshape", ("Transpose_5",)),
        Op("head", "MatMul", ("Reshape_6",)),
    )
    assert match_ops(original, converted) == {
        "Convolution_2": "conv",
        "Add_3": "norm/add",
        "Relu_4": "relu",
    }


def test_branches_are_told_apart_by_the_place_at_which_they_are_read():
    original = source(
        Op("left", "Conv2D", ("x",)),
        Op("right", "Conv2D", ("x",)),
        Op("sum", "AddV2", ("left", "right")),
    )
    converted = target(
        Op("b", "Convolution", ("x",)),
        Op("a", "Convolution", ("x",)),
        Op("c", "Add", ("a", "b")),
    )
    assert match_ops(original, converted) == {"a": "left", "b": "right", "c": "sum"}


def test_a_contraction_is_never_passed_over():
    original = source(Op("first", "MatMul", ("x",)), Op("second", "MatMul", ("first",)))
    converted = target(Op("Relu_1", "Relu", ("x",)), Op("second", "MatMul", ("Relu_1",)))
    assert match_ops(original, converted) == {}


def test_an_op_with_two_pairs_has_none():
    original = source(
        Op("one", "Relu", ("x",)),
        Op("two", "Relu", ("x",)),
        Op("sum", "AddV2", ("one", "two")),
    )
    converted = target(Op("Relu_1", "Relu", ("x",)), Op("sum", "Add", ("Relu_1", "Relu_1")))
    assert match_ops(original, converted) == {}


def test_names_of_the_source_stay_where_they_are():
    """An op that was split has its name and a part: no other op of the source is meant."""
    original = source(
        Op("a", "AddV2", ("x",)), Op("fc", "MatMul", ("a",)), Op("act", "Relu", ("fc",))
    )
    converted = target(
        Op("a", "Add", ("x",)),
        Op("fc", "MatMul", ("a",)),
        Op("fc/Add", "Add", ("fc",)),
        Op("act", "Relu", ("fc/Add",)),
    )
    assert match_ops(original, converted) == {}
