"""The functions a graph calls, such as the bodies of its loops, and what runs when it runs."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.tensor_graph import (
    FunctionDefLibrary,
    GraphDef,
    NodeDef,
    TensorGraph,
    copied,
    is_control,
    node_of,
)


def with_functions_of_its_own(graph: TensorGraph) -> TensorGraph:
    """The graph with the functions it calls, renamed, so that no other graph's bear their names.

    TensorFlow knows functions by name within a process, where the function that the graph was made
    from still exists, and passes over a graph change the definitions.
    """
    if not graph.library.function:
        return graph
    library = used_functions(graph.library, graph.nodes.values())
    del library.gradient[:]  # nothing is trained any more
    digest = hashlib.sha256(library.SerializeToString(deterministic=True)).hexdigest()[:12]
    names = {f.signature.name: f"{f.signature.name}_{digest}" for f in library.function}
    for function in library.function:
        function.signature.name = names[function.signature.name]
        _rename(function.node_def, names)
    nodes = {name: copied(node) for name, node in graph.nodes.items()}
    _rename(nodes.values(), names)
    return TensorGraph(nodes, graph.versions, library)


def _rename(nodes: Iterable[NodeDef], names: Mapping[str, str]) -> None:
    for node in nodes:
        node.op = names.get(node.op, node.op)
        for attribute in node.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in names:
                    function.name = names[function.name]


def called(node: NodeDef) -> Iterator[str]:
    """The functions that a node calls, and those that it hands to them."""
    yield node.op
    waiting = [*node.attr.values()]
    while waiting:
        value = waiting.pop()
        functions = [*value.list.func]
        if value.HasField("func"):
            functions.append(value.func)
        for function in functions:
            yield function.name
            waiting += function.attr.values()


def reached(
    graph: GraphDef, nodes: Iterable[str], functions: Iterable[str] = ()
) -> tuple[set[str], set[str]]:
    """Return the nodes and functions that run when some of them do.

    Returns:
        The names of nodes of the graph, and of functions in its library.
    """
    by_name = {node.name: node for node in graph.node}
    found = _closure(nodes, by_name, lambda name: map(node_of, by_name[name].input))
    calls = [*functions, *(name for node in found for name in called(by_name[node]))]
    return found, _run(graph.library, calls)


def _run(library: FunctionDefLibrary, calls: Iterable[str]) -> set[str]:
    """Return the functions of a library that run when some of them do, their gradients too."""
    by_name = {function.signature.name: function for function in library.function}
    gradients: dict[str, list[str]] = {}
    for gradient in library.gradient:
        gradients.setdefault(gradient.function_name, []).append(gradient.gradient_func)

    def needed(name: str) -> Iterator[str]:
        yield from gradients.get(name, [])
        for node in by_name[name].node_def:
            yield from called(node)

    return _closure(calls, by_name, needed)


def _closure(
    roots: Iterable[str], known: Container[str], needed: Callable[[str], Iterable[str]]
) -> set[str]:
    """Return all known names that some names need, directly or not, themselves included."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found and name in known:
            found.add(name)
            waiting += needed(name)
    return found


def used_functions(library: FunctionDefLibrary, nodes: Iterable[NodeDef]) -> FunctionDefLibrary:
    """Return a library of the functions alone that some nodes call or hand on."""
    run = _run(library, (name for node in nodes for name in called(node)))
    return FunctionDefLibrary(
        function=(f for f in library.function if f.signature.name in run),
        gradient=(g for g in library.gradient if g.function_name in run),
    )


def drop_unreachable(graph: GraphDef, roots: Iterable[str]) -> None:
    """Drop the nodes that no root needs, and the functions that no node calls.

    Args:
        graph: graph, changed in place.
        roots: tensors whose nodes stay, with all that these read or wait for; where a graph has
            none of them, or none is named, every node with a result that no other node reads.
    """
    known = {node.name for node in graph.node}
    kept = set(map(node_of, roots))
    if not kept or not kept <= known:
        kept = _loose(graph)
    needed, _ = reached(graph, kept)
    nodes = [node for node in graph.node if node.name in needed]
    if len(nodes) < len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
    graph.library.CopyFrom(used_functions(graph.library, graph.node))


def _loose(graph: GraphDef) -> set[str]:
    """The nodes with results that no other node reads; a node of an unknown op counts as such."""
    read = {node_of(t) for node in graph.node for t in node.input if not is_control(t)}
    found = set()
    for node in graph.node:
        definition = op_def_registry.get(node.op)
        if node.name not in read and (definition is None or definition.output_arg):
            found.add(node.name)
    return found
