"""Inlining of functional loops and branches (While, If, Case) into the graph.

The runtime does the same before a run. Inlined here, the ops of a body are ordinary ops with
kernels, precisions and times of their own. Their names start with those of the loop and its part:
`lstm/while/body/lstm_cell/MatMul`.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable

from neural_mp.adaptors.tensorflow.runtime import offline_passes
from neural_mp.adaptors.tensorflow.tensor_graph import (
    NodeDef,
    TensorGraph,
    copied,
    node_of,
    without_large,
)

_FUNCTIONAL = ("While", "StatelessWhile", "If", "StatelessIf", "Case", "StatelessCase")
#: Attribute that requests inlining from the runtime.
_ASKS = "_lower_using_switch_merge"
#: Name of an op in the body of a loop or branch.
_BODY = re.compile(r"^(?P<caller>.+?)/(?P<part>body|cond|then|else|branch\d+)/_\d+/(?P<rest>.+)$")


def lowered(graph: TensorGraph, inputs: Collection[str], outputs: Collection[str]) -> TensorGraph:
    """Return the graph with the bodies of its loops and branches inlined.

    Raises:
        tf.errors.OpError: the runtime refuses the graph.
    """
    if not any(node.op in _FUNCTIONAL for node in graph.nodes.values()):
        return _with_short_names(graph, [*inputs, *outputs])
    asking = TensorGraph(
        {name: _asking(node) for name, node in graph.nodes.items()}, graph.versions, graph.library
    )
    small, large = without_large(asking)
    for function in small.library.function:
        for node in function.node_def:
            if node.op in _FUNCTIONAL:
                node.attr[_ASKS].b = True
    passed = TensorGraph.from_graph_def(offline_passes(small, ("function",), inputs, outputs))
    for name, node in large.items():
        if name in passed:
            passed.add(node)
    return _with_short_names(passed, [*inputs, *outputs])


def _asking(node: NodeDef) -> NodeDef:
    if node.op not in _FUNCTIONAL:
        return node
    asking = copied(node)
    asking.attr[_ASKS].b = True
    return asking


def _with_short_names(graph: TensorGraph, ports: Iterable[str]) -> TensorGraph:
    """Return the graph with short names that mention each body once, without numbers.

    Args:
        graph: the graph.
        ports: tensors fed and fetched, whose nodes keep their names.
    """
    names: dict[str, str] = {}
    taken, kept = set(graph.nodes), set(map(node_of, ports))
    for name in graph.nodes:
        short = _short(name)
        if short != name and short not in taken and name not in kept:
            names[name] = short
            taken.add(short)
    return graph.renamed(names)


def _short(name: str) -> str:
    """Shorten `a/while/body/_1/a/while/cell/MatMul` to `a/while/body/cell/MatMul`, recursively."""
    found = _BODY.match(name)
    if found is None:
        return name
    caller, inner = found["caller"], found["rest"]
    around = "/".join(part for part in caller.split("/") if part not in ("body", "cond"))
    rest = _short(inner.removeprefix(f"{around}/"))
    return f"{caller}/{found['part']}/{rest}"
