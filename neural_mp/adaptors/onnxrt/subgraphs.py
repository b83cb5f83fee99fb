"""The graphs that nodes run: branches of If, bodies of Loop and Scan.

The name of an op in a body starts with that of the op that runs the body (`scan/product`). While a
model is processed, constants are in the main graph; conversions of a tensor are inserted into the
tensor's graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.common.naming import reserve_name


def bodies_of(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the direct bodies of a node; `then` before `else`."""
    for _, attribute in sorted(node.attributes.items(), reverse=True):
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        elif attribute.type is ir.AttributeType.GRAPHS:
            yield from attribute.as_graphs()


def in_order(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield all nodes; those of bodies directly precede the node that runs them."""
    for node in graph:
        for body in bodies_of(node):
            yield from in_order(body)
        yield node


def runners(graph: ir.Graph) -> dict[ir.Graph, ir.Node]:
    """Return body → the node that runs it, for all bodies within a graph."""
    return {body: node for node in in_order(graph) for body in bodies_of(node)}


def body_inputs(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the per-step inputs of bodies, in order."""
    for node in in_order(graph):
        for body in bodies_of(node):
            yield from (value for value in body.inputs if not value.is_initializer())


def spot_in(
    graph: ir.Graph, place: ir.Node | None, found: dict[ir.Graph, ir.Node]
) -> ir.Node | None:
    """Return the node of a graph that contains, or is, a place; None for the end.

    `found` are all bodies with the nodes that run them.
    """
    while place is not None and place.graph is not graph:
        place = found.get(place.graph) if isinstance(place.graph, ir.Graph) else None
    return place


def lift_constants(program: ir.Model) -> None:
    """Move all constants to the main graph, as expected elsewhere."""
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(program)
    common.NameFixPass()(program)  # names may repeat across bodies
    common.LiftSubgraphInitializersToMainGraphPass()(program)


def sink_constants(program: ir.Model) -> None:
    """Move constants that only one body reads into the body, and drop unused ones.

    A convolution whose weight is in another graph gets a slower kernel in ONNX Runtime.
    """
    graph = program.graph
    kept = {*graph.inputs, *graph.outputs}
    for value in list(graph.initializers.values()):
        readers = {use.node.graph for use in value.uses()}
        if value in kept or len(readers) != 1 or isinstance(value.const_value, ir.ExternalTensor):
            continue
        (reader,) = readers
        if isinstance(reader, ir.Graph) and reader is not graph:
            graph.initializers.pop(str(value.name))
            reader.register_initializer(value)
    for body in graph.subgraphs():
        for name, value in list(body.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del body.initializers[name]


def name_within_bodies(program: ir.Model) -> None:
    """Prefix names within bodies by the op that runs them; make them unique."""
    graph = program.graph
    values = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    values.update(str(value.name) for node in graph for value in node.outputs)
    nodes = {str(node.name) for node in graph} | {str(value.name) for value in graph.inputs}
    _name_within(graph, nodes, values)


def _name_within(graph: ir.Graph, nodes: set[str], values: set[str]) -> None:
    for runner in graph:
        for body in bodies_of(runner):
            for node in body:
                node.name = reserve_name(_within(runner, node.name or node.op_type), nodes)
            for value in body.inputs:
                value.name = reserve_name(_within(runner, value.name), values)
                nodes.add(str(value.name))  # plans and ranges use a single namespace
            for value in (result for node in body for result in node.outputs):
                value.name = reserve_name(str(value.name), values)
            _name_within(body, nodes, values)


def _within(runner: ir.Node, name: str | None) -> str:
    return str(name) if str(name).startswith(f"{runner.name}/") else f"{runner.name}/{name}"
