"""Sizes in a captured graph, worked out of the sizes of its inputs instead of what is computed.

A size that is asked of an op's result is one more reader of it: the result would be kept, and be
turned back from integers, for a number that is known beforehand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer
from torch.utils._sympy.interp import sympy_interp
from torch.utils._sympy.reference import PythonReferenceAnalysis

aten = torch.ops.aten

_ASKED = (aten.sym_size.int, aten.sym_numel.default)


def sizes_from_inputs(module: GraphModule) -> None:
    """Rewrite a graph in place; sizes that depend on values, not on sizes, stay as they are."""
    asked = [node for node in module.graph.nodes if node.target in _ASKED]
    known = _of_inputs(module.graph) if asked else {}
    for node in asked:
        value = node.meta["val"]
        if not isinstance(value, torch.SymInt):
            node.replace_all_uses_with(value)
        elif value.node.expr.free_symbols <= known.keys():
            expression = value.node.expr
            if expression not in known:
                known[expression] = _worked_out(node, expression, known)
            node.replace_all_uses_with(known[expression])
        else:
            continue
        module.graph.erase_node(node)


def _of_inputs(graph: Graph) -> dict[Any, Node]:
    """The symbol of a size → the node that asks an input for it."""
    inputs = graph.find_nodes(op="placeholder")
    known: dict[Any, Node] = {}
    # At the top, so that every size can be worked out of them.
    at = inputs[-1] if inputs else None
    for source in reversed(inputs):
        value = source.meta.get("val")
        for axis, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt) and size.node.expr.is_Symbol:
                with graph.inserting_after(at):
                    node = graph.call_function(aten.sym_size.int, (source, axis))
                node.meta["val"] = size
                known[size.node.expr] = node
    return known


def _worked_out(node: Node, expression: Any, known: dict[Any, Node]) -> Node:
    graph = node.graph
    tracer = GraphAppendingTracer(graph)
    last = node.prev
    with graph.inserting_before(node):
        symbols = {symbol: Proxy(known[symbol], tracer) for symbol in expression.free_symbols}
        result = sympy_interp(PythonReferenceAnalysis, symbols, expression).node
    while last.next is not node:
        last = last.next
        values = torch.fx.map_arg((last.args, last.kwargs), lambda read: read.meta["val"])
        target: Any = last.target
        last.meta["val"] = target(*values[0], **values[1])
    assert isinstance(result, Node)
    return result
