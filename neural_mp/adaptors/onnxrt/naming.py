"""Names of nodes and tensors, and constants that get new ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common


def name_nodes(program: ir.Model) -> None:
    """Give every node and tensor a name of its own.

    No node gets that of an input: plans and ranges speak of both in one breath.
    """
    common.NameFixPass()(program)
    taken = {value.name for value in program.graph.inputs}
    names = {node.name for node in program.graph} | taken
    for node in program.graph:
        if node.name in taken:
            node.name = unused(f"{node.name}_{node.op_type}", names)
            names.add(node.name)


def unused(name: str, names: Iterable[str | None]) -> str:
    """The name, or the first of its numbered forms that is not taken."""
    taken = names if isinstance(names, set) else set(names)
    number, found = 0, name
    while found in taken:
        number += 1
        found = f"{name}_{number}"
    return found


def names_in(graph: ir.Graph) -> Iterator[str | None]:
    """All names of a graph: of nodes, tensors and constants, those of the graphs in it included."""
    yield from graph.initializers
    yield from (value.name for value in graph.inputs)
    for node in graph:
        yield node.name
        yield from (value.name for value in node.outputs)
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
