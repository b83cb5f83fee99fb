"""The graphs that nodes run: branches of If, bodies of Loop and Scan.

The name of an op in a body starts with that of the op that runs the body (`scan/product`). While a
model is processed, constants are in the main graph; conversions of a tensor are inserted into the
tensor's graph.
"""

from __future__ import annotations

from collections.abc import Iterator

import onnx_ir as ir

from neural_mp.adaptors.common.naming import reserve_name

#: Op with states → positions of the first in the inputs of op and body, and in the body's results.
#: A Loop has its limit and condition first; its body, the iteration and condition.
_FIRST_STATES = {"Loop": (2, 1), "Scan": (0, 0)}
_GRAPH_TYPES = (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS)


def iterate_node_bodies(node: ir.Node) -> Iterator[ir.Graph]:
    """Yield the direct bodies of a node; `then` before `else`."""
    if not node.attributes:
        return
    running = [item for item in node.attributes.values() if item.type in _GRAPH_TYPES]
    for attribute in sorted(running, key=lambda item: item.name, reverse=True):
        if attribute.type is ir.AttributeType.GRAPH:
            yield attribute.as_graph()
        else:
            yield from attribute.as_graphs()


def in_order(graph: ir.Graph) -> Iterator[ir.Node]:
    """Yield all nodes; those of bodies directly precede the node that runs them."""
    for node in graph:
        for body in iterate_node_bodies(node):
            yield from in_order(body)
        yield node


def find_runners(graph: ir.Graph) -> dict[ir.Graph, ir.Node]:
    """Return body → the node that runs it, for all bodies within a graph."""
    return {body: node for node in in_order(graph) for body in iterate_node_bodies(node)}


def sink_constants(program: ir.Model) -> None:
    """Move constants that only one body reads into the body, and drop unused ones.

    A convolution whose weight is in another graph gets a slower kernel in ONNX Runtime.
    """
    graph = program.graph
    ports = {*graph.inputs, *graph.outputs}
    for value in list(graph.initializers.values()):
        readers = {use.node.graph for use in value.uses()}
        if value in ports or len(readers) != 1 or isinstance(value.const_value, ir.ExternalTensor):
            continue
        (reader,) = readers
        if isinstance(reader, ir.Graph) and reader is not graph:
            graph.initializers.pop(str(value.name))
            reader.register_initializer(value)
    for body in graph.subgraphs():
        for name, value in list(body.initializers.items()):
            if not value.uses() and not value.is_graph_output() and not value.is_graph_input():
                del body.initializers[name]


def hoist_loop_invariants(node: ir.Node) -> None:
    """Read states that no step of a Loop or Scan changes from outside, in place.

    Some exporters carry every weight of a body as a state.
    """
    (body,) = iterate_node_bodies(node)
    first, first_result = _FIRST_STATES[node.op_type]
    states = len(node.inputs) - first - node.attributes.get_int("num_scan_inputs", 0)
    unchanged = [
        index
        for index in range(states)
        if node.inputs[first + index] is not None
        and _skip_identities(body.outputs[first_result + index]) is body.inputs[first + index]
    ]
    if not unchanged or len(unchanged) == len(node.outputs):
        return
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    remaining = [index for index in range(len(node.outputs)) if index not in unchanged]
    inputs = [value for at, value in enumerate(node.inputs) if at - first not in unchanged]
    for index in reversed(unchanged):
        outer = node.inputs[first + index]
        assert outer is not None
        body.outputs.pop(first_result + index)
        body.inputs.pop(first + index).replace_all_uses_with(outer)
        replace_result(node, node.outputs[index], outer, f"{node.name}/{node.outputs[index].name}")
    results = [ir.val(None, type=node.outputs[index].type) for index in remaining]
    attributes = list(node.attributes.values())
    replacement = ir.Node("", node.op_type, inputs, attributes, outputs=results, name=node.name)
    graph.insert_before(node, replacement)
    for index, result in zip(remaining, results, strict=True):
        old = node.outputs[index]
        result.name, result.shape = old.name, old.shape
        old.replace_all_uses_with(result, replace_graph_outputs=True)
        old.name = None
    graph.remove(node, safe=True)


def _skip_identities(value: ir.Value) -> ir.Value:
    producer = value.producer()
    while producer is not None and producer.op_type == "Identity" and not producer.domain:
        (source,) = producer.inputs
        if source is None:
            break
        value, producer = source, source.producer()
    return value


def replace_result(node: ir.Node, result: ir.Value, value: ir.Value, copy_name: str) -> None:
    """Replace a result of a node by a value from outside; a graph output keeps its name.

    It then becomes the result of an Identity with the name `copy_name`.
    """
    if result.is_graph_output() and isinstance(node.graph, ir.Graph):
        copy = ir.node("Identity", [value], name=copy_name)
        node.graph.insert_before(node, copy)
        value = copy.outputs[0]
        value.name, value.type, value.shape = result.name, result.type, result.shape
        result.name = None
    result.replace_all_uses_with(value, replace_graph_outputs=True)


def name_within_bodies(program: ir.Model) -> None:
    """Prefix names within bodies by the op that runs them; make them unique."""
    graph = program.graph
    values = {str(value.name) for value in (*graph.inputs, *graph.initializers.values())}
    values.update(str(value.name) for node in graph for value in node.outputs)
    nodes = {str(node.name) for node in graph} | {str(value.name) for value in graph.inputs}
    _name_within(graph, nodes, values)


def _name_within(graph: ir.Graph, nodes: set[str], values: set[str]) -> None:
    for runner in graph:
        for body in iterate_node_bodies(runner):
            for node in body:
                node.name = reserve_name(_qualify_name(runner, node.name or node.op_type), nodes)
            for value in body.inputs:
                value.name = reserve_name(_qualify_name(runner, value.name), values)
                nodes.add(str(value.name))  # plans and ranges use a single namespace
            for value in (result for node in body for result in node.outputs):
                value.name = reserve_name(str(value.name), values)
            _name_within(body, nodes, values)


def _qualify_name(runner: ir.Node, name: str | None) -> str:
    return str(name) if str(name).startswith(f"{runner.name}/") else f"{runner.name}/{name}"
