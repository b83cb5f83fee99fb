"""Functions called by a graph, loop frames, and reachability of nodes and functions."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONTROL_FLOW,
    FunctionDefLibrary,
    GraphDef,
    NodeDef,
    TensorGraph,
    copied,
    is_control,
    node_of,
    output_of,
)


def with_functions_of_its_own(graph: TensorGraph) -> TensorGraph:
    """Return the graph with the functions it calls renamed uniquely in this process.

    TensorFlow resolves functions by name per process. The original functions still exist, while
    passes over the graph change the definitions.
    """
    if not graph.library.function:
        return graph
    library = used_functions(graph.library, graph.nodes.values())
    del library.gradient[:]  # training has ended
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
    """Yield the functions that a node calls or passes to its callees, its own op included."""
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
    """Return the nodes and functions that run when the given ones run.

    Returns:
        Names of nodes of the graph, and of functions in its library.
    """
    by_name = {node.name: node for node in graph.node}
    found = _closure(nodes, by_name, lambda name: map(node_of, by_name[name].input))
    calls = [*functions, *(name for node in found for name in called(by_name[node]))]
    return found, _run(graph.library, calls)


def _run(library: FunctionDefLibrary, calls: Iterable[str]) -> set[str]:
    """Return the functions of a library that run when the given ones run, with gradients."""
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
    """Return all known names that the roots need, directly or not, roots included."""
    found: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in found and name in known:
            found.add(name)
            waiting += needed(name)
    return found


def used_functions(library: FunctionDefLibrary, nodes: Iterable[NodeDef]) -> FunctionDefLibrary:
    """Return a library of only the functions that the nodes call or pass on."""
    run = _run(library, (name for node in nodes for name in called(node)))
    return FunctionDefLibrary(
        function=(f for f in library.function if f.signature.name in run),
        gradient=(g for g in library.gradient if g.function_name in run),
    )


def drop_unreachable(graph: GraphDef, roots: Iterable[str]) -> None:
    """Drop the nodes that no root needs, and the functions that no node calls.

    Args:
        graph: graph, changed in place.
        roots: tensors whose nodes stay, with all nodes these depend on; if empty, or if any is
            missing, every node with an unread result is a root.
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
    """Return the nodes with unread results; nodes of unknown op types count."""
    read = {node_of(t) for node in graph.node for t in node.input if not is_control(t)}
    found = set()
    for node in graph.node:
        definition = op_def_registry.get(node.op)
        if node.name not in read and (definition is None or definition.output_arg):
            found.add(node.name)
    return found


ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")
SWITCHES = ("Switch", "RefSwitch", "_SwitchN")


def in_loops(graph: TensorGraph) -> frozenset[str]:
    """Return all nodes from an Enter to an Exit, both included.

    These nodes cannot be fetched, and their constants must be tied to an iteration.
    """
    within = frames(graph)
    ends = {
        name
        for name, node in graph.nodes.items()
        if node.op in EXITS and node_of(node.input[0]) in within
    }
    return frozenset(within) | ends


def frames(graph: TensorGraph) -> dict[str, str]:
    """Return node → the loop (`frame_name`) of its results, for nodes within loops.

    The results of an Exit belong to the frame around the loop.
    """
    found = {
        name: node.attr["frame_name"].s.decode()
        for name, node in graph.nodes.items()
        if node.op in ENTERS
    }
    if not found:
        return {}
    consumers = graph.consumers()
    around: dict[str, str] = {}  # loop → enclosing loop
    waiting = list(found)
    ends: list[str] = []
    while waiting:
        name = waiting.pop()
        for reader, _ in consumers[name]:
            op = graph.nodes[reader].op
            if op in ENTERS:
                around[found[reader]] = found[name]
            elif op in EXITS:
                ends.append(reader)
            elif reader not in found:
                found[reader] = found[name]
                waiting.append(reader)
        if not waiting:
            known = [e for e in ends if e not in found and _loop_of(graph, e, found) in around]
            found.update({end: around[_loop_of(graph, end, found)] for end in known})
            waiting.extend(known)
    return found


def _loop_of(graph: TensorGraph, end: str, found: Mapping[str, str]) -> str:
    return found[node_of(graph.nodes[end].input[0])]


def in_bodies(graph: TensorGraph) -> frozenset[str]:
    """Return the ops that run exactly once per iteration of a loop, behind its condition.

    Ops in a branch within the loop, and behind such a branch, are left out.
    """
    within, consumers = frames(graph), graph.consumers()
    waiting = [
        reader
        for name, node in graph.nodes.items()
        if node.op in SWITCHES and graph[node.input[1]].op == "LoopCond"
        for reader, place in consumers[name]
        if output_of(graph.nodes[reader].input[place]) == 1
    ]
    bodies: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in within and name not in bodies and graph.nodes[name].op not in CONTROL_FLOW:
            bodies.add(name)
            waiting.extend(reader for reader, _ in consumers[name])
    return frozenset(bodies)
