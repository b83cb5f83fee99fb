"""Graph files, and properties of a bare graph: inputs, outputs, validity."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import tensorflow as tf
from google.protobuf import text_format
from google.protobuf.message import DecodeError, Message
from tensorflow.core.framework.function_pb2 import FunctionDef
from tensorflow.python.framework import function_def_to_graph

from neural_mp.adaptors.tensorflow.files.graph_checks import check_graph
from neural_mp.adaptors.tensorflow.graph.control_flow import drop_unreachable
from neural_mp.adaptors.tensorflow.graph.ops import (
    CONTROL_FLOW,
    PLACEHOLDERS,
    Role,
    role_of,
    types_of,
)
from neural_mp.adaptors.tensorflow.graph.runtime import imported, runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    GraphDef,
    NodeDef,
    TensorGraph,
    data_inputs,
    indexed,
    make_node,
    node_of,
    without_large,
)
from neural_mp.errors import ConfigurationError, ModelLoadError, did_you_mean

#: Suffixes of graph files.
SUFFIXES = (".pb", ".pbtxt")
#: Errors that damaged files and unexpected contents raise.
UNREADABLE = (DecodeError, text_format.ParseError, UnicodeDecodeError, OSError, RecursionError)
#: Ops with unread results that are not outputs.
_NO_OUTPUTS = {
    CONSTANT,
    *PLACEHOLDERS,
    *types_of(Role.NOTHING, Role.CHECK),
    *CONTROL_FLOW.difference(types_of(Role.MERGE, Role.EXIT)),
}


def read(path: Path, ports: Iterable[str] = ()) -> tuple[GraphDef, list[str]]:
    """Return the graph in a `.pb` or `.pbtxt` file without unreachable nodes, and warnings.

    `ports` are the names of the outputs and inputs if the user named the outputs.

    Raises:
        ModelLoadError: the file is of another type, damaged or cut off.
    """
    if path.suffix not in SUFFIXES:
        raise ModelLoadError(
            f"a TensorFlow model must be a SavedModel folder or a file that ends in .keras, .h5, "
            f"{' or '.join(SUFFIXES)}, got {str(path)!r}"
        )
    graph = GraphDef()
    try:
        parse(path, graph)
    except UNREADABLE as error:
        raise ModelLoadError(
            f"{str(path)!r} is not a graph file, or damaged: {str(error).splitlines()[0]}"
        ) from error
    if not graph.node:
        raise ModelLoadError(f"the graph in {str(path)!r} must have nodes, got none")
    # Only the reachable part is checked: TensorFlow never sees the rest.
    drop_unreachable(graph, ports)
    check_graph(graph, f"the graph in {str(path)!r}")
    if graph.versions.producer or path.suffix != ".pb":
        return graph, []
    # The version follows the nodes, so a file that was cut between two nodes lacks the version.
    return graph, [
        f"{str(path)!r} records no TensorFlow version, as if the file were cut off; check that the "
        f"outputs are the right ones"
    ]


def parse(path: Path, message: Message) -> None:
    """Parse a file into a message: binary if its name ends in `.pb`, else text.

    Raises:
        Exception: one of `UNREADABLE`.
    """
    if path.suffix == ".pb":
        message.ParseFromString(path.read_bytes())
    else:
        text_format.Parse(path.read_text(encoding="utf-8"), message)
        # Nesting too deep for the binary format would otherwise fail on the first copy.
        message.ParseFromString(message.SerializeToString())


def write(graph: GraphDef, path: Path) -> None:
    """Write a graph as `.pb` or `.pbtxt`, depending on the file name."""
    if path.suffix == ".pbtxt":
        path.write_text(text_format.MessageToString(graph), encoding="utf-8")
    else:
        path.write_bytes(graph.SerializeToString(deterministic=True))


def checked(graph: GraphDef, what: str) -> tf.Graph:
    """Return the graph as imported, and thereby checked, by TensorFlow.

    Raises:
        ModelLoadError: the graph, or a function in its library, has unknown ops or is incomplete.
    """
    try:
        loaded = imported(without_large(graph))
        with loaded.as_default():
            for function in graph.library.function:
                _check_function(function)
    except (ValueError, KeyError, TypeError, tf.errors.OpError) as error:
        lines = str(error).strip().splitlines()
        raise ModelLoadError(
            f"the installed TensorFlow cannot run {what}: {lines[0] if lines else error}"
        ) from error
    return loaded


def _check_function(function: FunctionDef) -> None:
    """Check the nodes of a function by importing the function into a graph of its own.

    Importing a graph checks only the signatures of the functions in its library.

    Raises:
        ValueError: the nodes do not fit each other.
    """
    if function.signature.attr:  # types are set by the caller
        return
    runnable(function_def_to_graph.function_def_to_graph_def(function)[0])


def tensor_named(graph: tf.Graph, name: str, option: str) -> tf.Tensor:
    """Return a tensor of a graph by its name, with or without `:0`.

    Raises:
        ConfigurationError: the graph has no such tensor.
    """
    try:
        return graph.get_tensor_by_name(indexed(name))
    except (KeyError, ValueError):
        names = [o.name for o in graph.get_operations() if o.type != CONSTANT and o.outputs]
        raise ConfigurationError(
            f"{option} names {name!r}, which is not a tensor of the graph"
            f"{did_you_mean(node_of(name), names)}"
        ) from None


def loose_ends(graph: TensorGraph, checked_graph: tf.Graph) -> tuple[str, ...]:
    """Return the nodes with unread results: the outputs of a graph that names none."""

    def hangs_on_a_switch(node: NodeDef) -> bool:
        """Whether a node only marks a branch of control flow."""
        passes_on = role_of(node) is Role.IDENTITY
        return passes_on and role_of(graph[node.input[0]]) is Role.SWITCH

    read_by_others = {node_of(t) for node in graph.nodes.values() for t in data_inputs(node)}
    return tuple(
        name
        for name, node in graph.nodes.items()
        if name not in read_by_others
        and node.op not in _NO_OUTPUTS
        and not hangs_on_a_switch(node)
        and checked_graph.get_operation_by_name(name).outputs
    )


def placeholders(graph: TensorGraph, outputs: tuple[str, ...]) -> tuple[str, ...]:
    """Return the placeholders that the outputs depend on, in file order."""
    defined = [name for name in outputs if name in graph]
    needed = graph.pruned(defined).nodes if defined else graph.nodes
    return tuple(
        name for name, node in graph.nodes.items() if node.op in PLACEHOLDERS and name in needed
    )


def cut_at(graph: TensorGraph, checked_graph: tf.Graph, inputs: tuple[str, ...]) -> None:
    """Replace every computed tensor named as an input by a placeholder."""
    for name in inputs:
        if name not in graph or graph[name].op in PLACEHOLDERS:
            continue
        tensor = tensor_named(checked_graph, name, "inputs")
        if len(tensor.op.outputs) > 1:
            raise ConfigurationError(
                f"inputs must name ops with one result, got {name!r}, one of "
                f"{len(tensor.op.outputs)} results of an op"
            )
        graph.add(make_node("Placeholder", node_of(name), dtype=tensor.dtype, shape=tensor.shape))
