"""Places of values in a simulation, for messages."""

from __future__ import annotations

from collections.abc import Iterator

from torch.fx import Graph, Node

from neural_mp.adaptors.pytorch.graph import graph_edit as fx

#: Key of `Node.meta` for the place of a value that is checked for NaN.
PLACE = "neural_mp_place"


def name_places(graph: Graph) -> None:
    """Name the places of all tensors of a graph, before its ops are fused."""
    for node in graph.nodes:
        if node.op != "output" and fx.has_tensors(node):
            node.meta.setdefault(PLACE, _describe_location(node))


def weight_of(layer: Node) -> str:
    """Return the place of the weight of a layer."""
    return f"a weight of layer {layer.meta[fx.OP_NAME]!r}"


def _describe_location(node: Node) -> str:
    if node.op == "placeholder":
        return f"the input {fx.tensor_name(node)!r}"
    if fx.OP_NAME in node.meta:
        return f"the result of layer {node.meta[fx.OP_NAME]!r}"
    kind = "a weight" if node.op == "get_attr" else "a quantized tensor"
    return f"{kind} of layer {next(_consumer_ops(node), node.name)!r}"


def _consumer_ops(node: Node) -> Iterator[str]:
    """Yield the names of the ops that read a node's result, nearest first."""
    for user in node.users:
        if fx.OP_NAME in user.meta:
            yield str(user.meta[fx.OP_NAME])
        else:
            yield from _consumer_ops(user)
