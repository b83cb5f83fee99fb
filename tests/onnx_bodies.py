"""ONNX models with bodies: builders, and models that are odd in one way each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper
from onnx_nets import graph, op

FLOAT, INT64, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
STEPS, BATCH, WIDTH, HIDDEN = 7, 3, 8, 16
Feeds = dict[str, np.ndarray]
#: A model, and the batches it is calibrated and judged on.
Odd = tuple[onnx.ModelProto, list[Feeds]]


def draw(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


W, U = draw(HIDDEN, HIDDEN, seed=1) / 4, draw(WIDTH, HIDDEN, seed=2) / 4
START = {"start": draw(BATCH, HIDDEN, seed=3)}
IMAGE = draw(2, 3, 8, 8, seed=5)


def info(name: str, kind: int = FLOAT, shape: Any = None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def body(
    nodes: Iterable[onnx.NodeProto],
    inputs: Iterable[Any] = (),
    outputs: Iterable[Any] = (),
    constants: dict[str, np.ndarray] | None = None,
) -> onnx.GraphProto:
    """A graph for a node to run; its inputs and outputs are floats unless they say otherwise."""
    nodes = list(nodes)
    for node in nodes:
        node.name = node.name or node.output[0]

    def declared(values: Iterable[Any]) -> list[onnx.ValueInfoProto]:
        return [value if not isinstance(value, str) else info(value) for value in values]

    initializers = [
        onnx.numpy_helper.from_array(array, name) for name, array in (constants or {}).items()
    ]
    return helper.make_graph(nodes, "body", declared(inputs), declared(outputs), initializers)


def loop_body(nodes: Iterable[onnx.NodeProto], outputs: Iterable[Any], *carried: Any) -> Any:
    """The body of a Loop whose condition stays true."""
    return body(
        [op("Identity", "go", "still"), *nodes],
        [info("turn", INT64, []), info("go", BOOL, []), *carried],
        [info("still", BOOL), *outputs],
    )


def loop(
    nodes: Iterable[onnx.NodeProto],
    outputs: Iterable[Any],
    constants: dict[str, np.ndarray] | None = None,
    inputs: dict[str, list] | None = None,
) -> onnx.ModelProto:
    """A Loop of three turns that carries `s`."""
    node = op("Loop", "turns - start", "result", body=loop_body(nodes, outputs, "s"))
    node.name = "loop"
    tensors = {"turns": np.array(3), "w": W, **(constants or {})}
    return graph(
        [node, op("Relu", "result", "y")], inputs or {"start": ["n", HIDDEN]}, ["y"], tensors
    )


def either(
    then: onnx.GraphProto,
    otherwise: onnx.GraphProto,
    inputs: dict[str, list],
    constants: dict[str, np.ndarray],
    prefix: Iterable[onnx.NodeProto] = (),
    behind: Iterable[onnx.NodeProto] = (),
    opset: int = 20,
) -> onnx.ModelProto:
    """A model of two branches, told by an input which is to be taken; `i` is their result."""
    node = op("If", "chosen", "i", then_branch=then, else_branch=otherwise)
    node.name = "either"
    behind = list(behind) or [op("Identity", "i", "y")]
    model = graph([*prefix, node, *behind], inputs, ["y"], constants, opset=opset)
    model.graph.input.append(info("chosen", BOOL, []))
    return model


def both(feeds: Feeds) -> list[Feeds]:
    """Inputs of which the first takes the one branch, and the second the other."""
    return [{**feeds, "chosen": np.array(chosen)} for chosen in (True, False)]


PRODUCT = (op("MatMul", "s w", "p"), op("Tanh", "p", "next"))


def same_initializers() -> Odd:
    """Weights of both branches that lie within them and have one name."""
    nodes = op("Conv", "x k", "c"), op("Relu", "c", "result")
    branches = (body(nodes, [], ["result"], {"k": draw(4, 3, 3, 3, seed=s)}) for s in (0, 9))
    return either(*branches, {"x": ["n", 3, 8, 8]}, {}), both({"x": IMAGE})


def while_loop() -> Odd:
    """A Loop that ends when a number says so, and gives back every state."""
    sizes = [op("ReduceSum", "next", "t", keepdims=0), op("Abs", "t", "size")]
    nodes = [*PRODUCT, *sizes, op("Greater", "size least", "still"), op("Identity", "next", "out")]
    inner = body(
        nodes,
        [info("turn", INT64, []), info("go", BOOL, []), "s"],
        [info("still", BOOL), "next", "out"],
    )
    node = helper.make_node("Loop", ["", "yes", "start"], ["last", "all"], name="loop", body=inner)
    constants = {"w": W, "yes": np.array(True), "least": np.array(0.5, np.float32)}
    behind = [op("Relu", "last", "y"), op("Neg", "all", "z")]
    return graph([node, *behind], {"start": ["n", HIDDEN]}, ["y", "z"], constants), [START]


def no_turns() -> Odd:
    return loop(PRODUCT, ["next"], {"turns": np.array(0)}), [START]


def constant_branch() -> Odd:
    """A branch that gives back a constant from outside."""
    then, otherwise = (
        body([op("Identity", "k", "result")], [], ["result"]),
        body([op("MatMul", "x w", "result")], [], ["result"]),
    )
    behind = [op("MatMul", "i v", "y")]
    constants = {"w": W, "v": draw(HIDDEN, HIDDEN, seed=8) / 4, "k": draw(2, HIDDEN)}
    model = either(then, otherwise, {"x": ["n", HIDDEN]}, constants, behind=behind)
    return model, both({"x": draw(3, HIDDEN)})


def own_input_as_output() -> Odd:
    model = loop([op("MatMul", "s w", "p"), op("Tanh", "p", "out")], ["s", "out"])
    model.graph.node[0].output.append("all")
    return model, [START]


def old_opset() -> Odd:
    """An opset that is raised, and one without sequences that pass through branches."""
    then = body([op("Conv", "x w", "c"), op("Relu", "c", "result")], [], ["result"])
    otherwise = body([op("Conv", "x v", "result")], [], ["result"])
    constants = {"w": draw(4, 3, 3, 3), "v": draw(4, 3, 3, 3, seed=3)}
    model = either(then, otherwise, {"x": ["n", 3, 8, 8]}, constants, opset=11)
    return model, both({"x": IMAGE})


def scan_in_a_branch() -> Odd:
    shape = [BATCH, HIDDEN]
    inner = body(
        [*PRODUCT, op("Identity", "next", "out")],
        [info("s", FLOAT, shape), info("given", FLOAT, shape)],
        [info("next", FLOAT, shape), info("out", FLOAT, shape)],
    )
    node = helper.make_node(
        "Scan", ["start", "x"], ["last", "all"], name="scan", body=inner, num_scan_inputs=1
    )
    then, otherwise = body([node], [], ["all"]), body([op("Neg", "x", "neg")], [], ["neg"])
    constants = {"w": W, "start": START["start"]}
    return either(then, otherwise, {"x": [5, *shape]}, constants), both({"x": draw(5, *shape)})


def recurrent_layer_in_a_loop() -> Odd:
    nodes = [op("LSTM", "s k r", "all", hidden_size=16), op("Squeeze", "all axis", "next")]
    constants = {
        "k": draw(1, 64, 16, seed=1) / 4,
        "r": draw(1, 64, 16, seed=2) / 4,
        "axis": np.array([1]),
    }
    model = loop(nodes, ["next"], constants, {"start": ["steps", "n", 16]})
    return model, [{"start": draw(6, 3, 16)}]


def gru_in_a_branch() -> Odd:
    then = body([op("GRU", "x k r", "all", hidden_size=16)], [], ["all"])
    otherwise = body([op("Unsqueeze", "x axis", "all")], [], ["all"])
    constants = {
        "k": draw(1, 48, 16, seed=1) / 4,
        "r": draw(1, 48, 16, seed=2) / 4,
        "axis": np.array([1]),
    }
    return either(then, otherwise, {"x": ["t", "n", 16]}, constants), both({"x": draw(6, 3, 16)})


def quantized_around() -> Odd:
    """A tensor that convolutions read in both branches, and behind them."""
    then = body([op("Conv", "r w", "result")], [], ["result"])
    otherwise = body([op("Relu", "r", "q"), op("Conv", "q v", "result")], [], ["result"])
    constants = {name: draw(4, 4, 3, 3, seed=seed) / 4 for seed, name in enumerate("wvu")}
    prefix = [op("Conv", "x k", "first"), op("Relu", "first", "r")]
    behind = [op("Conv", "r u", "o"), op("Add", "i o", "y")]
    constants["k"] = draw(4, 3, 1, 1, seed=6)
    model = either(then, otherwise, {"x": ["n", 3, 8, 8]}, constants, prefix, behind)
    return model, both({"x": IMAGE})


def deep() -> Odd:
    """Branches within branches, four deep."""
    nodes: list[onnx.NodeProto] = [op("MatMul", "c1 w", "p"), op("Tanh", "p", "leaf")]
    result = "leaf"
    for level in range(1, 5):
        then = body(nodes, [], [result])
        otherwise = body([op("Neg", f"c{level}", f"n{level}")], [], [f"n{level}"])
        source = f"c{level + 1}" if level < 4 else "x"
        choice = op("If", "chosen", f"o{level}", then_branch=then, else_branch=otherwise)
        nodes, result = [op("Relu", source, f"c{level}"), choice], f"o{level}"
    model = graph([*nodes, op("Neg", result, "y")], {"x": ["n", HIDDEN]}, ["y"], {"w": W})
    model.graph.input.append(info("chosen", BOOL, []))
    return model, both({"x": draw(3, HIDDEN)})


def table_read_by_turn() -> Odd:
    nodes = [op("Gather", "table turn", "row"), op("MatMul", "s w", "p"), op("Add", "p row", "q")]
    return loop([*nodes, op("Tanh", "q", "next")], ["next"], {"table": draw(5, HIDDEN)}), [START]


def one_weight_inside_and_out() -> Odd:
    model = loop(PRODUCT, ["next"])
    model.graph.node.append(op("MatMul", "y w", "z"))
    model.graph.node[-1].name = "outer"
    model.graph.output[0].name = "z"
    return model, [START]


def carried_sequence() -> Odd:
    sequence, grown = (
        helper.make_tensor_sequence_value_info(n, FLOAT, None) for n in ("q", "grown")
    )
    inner = loop_body(
        [*PRODUCT, op("SequenceInsert", "q next", "grown")], ["next", grown], "s", sequence
    )
    node = helper.make_node(
        "Loop", ["turns", "", "start", "empty"], ["last", "all"], name="loop", body=inner
    )
    nodes = [op("SequenceEmpty", "", "empty"), node, op("ConcatFromSequence", "all", "y", axis=0)]
    constants = {"w": W, "turns": np.array(3)}
    return graph(nodes, {"start": ["n", HIDDEN]}, ["y"], constants), [START]


def op_called_like_its_runner() -> Odd:
    return loop([op("MatMul", "s w", "loop"), op("Tanh", "loop", "next")], ["next"]), [START]


ODD = (
    same_initializers,
    while_loop,
    no_turns,
    constant_branch,
    own_input_as_output,
    old_opset,
    scan_in_a_branch,
    recurrent_layer_in_a_loop,
    gru_in_a_branch,
    quantized_around,
    deep,
    table_read_by_turn,
    one_weight_inside_and_out,
    carried_sequence,
    op_called_like_its_runner,
)
