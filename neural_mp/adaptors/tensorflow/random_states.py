"""Random numbers from variables: seeds and generators become sources of random integers.

A frozen graph keeps no state between runs. The state of a random generator, e.g. in a Keras layer
that is random at inference, serves to draw other numbers in every run. Random integers in place of
the state lead to the same distribution.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.ops import Trait, has_trait
from neural_mp.adaptors.tensorflow.tensor_graph import (
    Consumers,
    NodeDef,
    TensorGraph,
    data_inputs,
    is_control,
    make_node,
    node_of,
)

#: Ops that return the state of a generator and advance the generator.
_DRAWS = ("RngReadAndSkip",)
#: Ops that draw from the state of a generator → the same op without a generator.
_STATEFUL = {
    "StatefulStandardNormalV2": "RandomStandardNormal",
    "StatefulTruncatedNormal": "TruncatedNormal",
    "StatefulUniform": "RandomUniform",
    "StatefulUniformInt": "RandomUniformInt",
    "StatefulUniformFullInt": "NonDeterministicInts",
}
#: Inputs of random ops that determine the numbers.
_SEEDS = ("seed", "key", "counter")
_READ, _WRITE = "ReadVariableOp", "AssignVariableOp"
#: Types of random integers.
_INTEGERS = (tf.int32, tf.int64, tf.uint32, tf.uint64)


def freeze_random_states(
    graph: TensorGraph, handles: Mapping[str, str], size: Callable[[str], int]
) -> None:
    """Replace reads of generators, and of seeds that the model changes, by random integers.

    Args:
        graph: the graph, changed in place.
        handles: node that passes on a variable → the node of the variable.
        size: returns the number of elements of a variable.
    """
    by_handle: dict[str, list[NodeDef]] = {}
    for node in graph.nodes.values():
        if node.input and node.name not in handles and node_of(node.input[0]) in handles:
            by_handle.setdefault(handles[node_of(node.input[0])], []).append(node)
    consumers = graph.consumers()
    for handle, users in by_handle.items():
        changed = any(user.op == _WRITE for user in users)
        for user in users:
            if user.op in _DRAWS:
                _put_integers(graph, user, size(handle), tf.int64)
            elif user.op in _STATEFUL:
                _put_stateless(graph, user)
        reads = [user for user in users if user.op == _READ] if changed else []
        if all(_only_seeds(graph, consumers, handles, source) for source in reads):
            for source in reads:
                dtype = tf.as_dtype(source.attr["dtype"].type)
                _put_integers(graph, source, size(handle), dtype)


def _put_integers(graph: TensorGraph, node: NodeDef, size: int, dtype: tf.DType) -> None:
    """Replace a node by a vector of random integers."""
    shape = graph.put_constant(f"{node.name}/size", np.array([size], np.int64))
    controls = filter(is_control, node.input)
    types = {"dtype": dtype, "shape_dtype": tf.int64}
    graph.add(make_node("NonDeterministicInts", node.name, [shape, *controls], **types))


def _put_stateless(graph: TensorGraph, node: NodeDef) -> None:
    """Replace a node that draws from a generator by the op without a generator."""
    op = _STATEFUL[node.op]
    stateless = make_node(op, node.name, [*data_inputs(node)[2:], *filter(is_control, node.input)])
    dtype, shape = node.attr["dtype"].type, node.attr["shape_dtype"].type or tf.int64
    if op == "NonDeterministicInts":
        stateless.attr["dtype"].type, stateless.attr["shape_dtype"].type = dtype, shape
    else:
        stateless.attr["Tout" if op == "RandomUniformInt" else "dtype"].type = dtype
        stateless.attr["T"].type = shape
    graph.add(stateless)


def _only_seeds(
    graph: TensorGraph, consumers: Consumers, handles: Mapping[str, str], source: NodeDef
) -> bool:
    """Whether the value of a variable is an integer that only seeds random ops and itself."""
    if tf.as_dtype(source.attr["dtype"].type) not in _INTEGERS:
        return False
    waiting, visited = [str(source.name)], {str(source.name)}
    while waiting:
        name = waiting.pop()
        readers = list(_readers(graph, consumers, name))
        if not readers and name != source.name:
            return False  # an output
        for reader, position in readers:
            own = handles.get(node_of(reader.input[0])) == handles[node_of(source.input[0])]
            if (reader.op == _WRITE and own) or _seeds(reader, position):
                continue
            if not has_trait(reader, Trait.COMPUTES_SEEDS):
                return False
            if reader.name not in visited:
                visited.add(str(reader.name))
                waiting.append(str(reader.name))
    return True


def _readers(graph: TensorGraph, consumers: Consumers, name: str) -> Iterator[tuple[NodeDef, int]]:
    """Yield the nodes that read a node's results, each with the position of the input."""
    for reader, position in consumers[name]:
        node = graph.nodes[reader]
        if not is_control(node.input[position]):
            yield node, position


def _seeds(node: NodeDef, position: int) -> bool:
    """Whether an input of a random op determines the numbers of the op."""
    definition = op_def_registry.get(node.op)
    if definition is None or not node.op.startswith("Stateless"):
        return False
    arguments = definition.input_arg
    return position < len(arguments) and arguments[position].name in _SEEDS
