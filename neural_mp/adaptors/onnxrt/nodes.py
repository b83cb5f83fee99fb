"""Names of nodes and tensors, and constants that get new ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.free_names import unused


def name_nodes(program: ir.Model) -> None:
    """Give every node and tensor a name of its own.

    No node gets that of an input: plans and ranges speak of both in one breath.
    """
    common.NameFixPass()(program)
    taken = {str(value.name) for value in program.graph.inputs}
    names = {str(node.name) for node in program.graph} | taken
    for node in program.graph:
        if node.name in taken:
            node.name = unused(f"{node.name}_{node.op_type}", names)
            names.add(node.name)


def names_in(graph: ir.Graph) -> Iterator[str]:
    """All names of a graph: of nodes, tensors and constants, those of the graphs in it included."""
    yield from graph.initializers
    for named in (*graph.inputs, *graph, *(value for node in graph for value in node.outputs)):
        if named.name is not None:
            yield named.name
    for inner in graph.subgraphs():
        yield from names_in(inner)


def constant(
    graph: ir.Graph, name: str, array: np.ndarray, dtype: ir.DataType | None = None
) -> ir.Value:
    """A new constant of a graph."""
    name = unused(name, graph.initializers)
    tensor = ir.tensor(array, dtype=dtype, name=name)
    value = ir.val(name, tensor.dtype, ir.Shape(array.shape), const_value=tensor)
    graph.register_initializer(value)
    return value
