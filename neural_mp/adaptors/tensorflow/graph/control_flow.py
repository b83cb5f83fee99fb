"""Loops, branches and functions: inlining, frames, and reachability of nodes and functions.

Functional loops and branches (While, If, Case) are inlined as the runtime does before a run: ops of
a body then have kernels, precisions and times of their own. Their names start with those of the
loop and its part: `lstm/while/body/lstm_cell/MatMul`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain

from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW, Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.runtime import optimize_graph
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    FunctionDefLibrary,
    GraphDef,
    NodeDef,
    TensorGraph,
    copy_node,
    get_node_name,
    get_output_index,
    is_control,
)


def with_functions_of_its_own(graph: TensorGraph) -> TensorGraph:
    """Return the graph with the functions it calls renamed uniquely in this process.

    TensorFlow resolves functions by name per process. The original functions still exist, while
    passes over the graph change the definitions.
    """
    if not graph.library.function:
        return graph
    library = select_used_functions(graph.library, graph.nodes.values())
    del library.gradient[:]  # training has ended
    digest = hashlib.sha256(library.SerializeToString(deterministic=True)).hexdigest()[:12]
    names = {f.signature.name: f"{f.signature.name}_{digest}" for f in library.function}
    for function in library.function:
        function.signature.name = names[function.signature.name]
        _rename_functions(function.node_def, names)
    nodes = {name: copy_node(node) for name, node in graph.nodes.items()}
    _rename_functions(nodes.values(), names)
    return TensorGraph(nodes, graph.versions, library)


def _rename_functions(nodes: Iterable[NodeDef], names: Mapping[str, str]) -> None:
    for node in nodes:
        node.op = names.get(node.op, node.op)
        for attribute in node.attr.values():
            for function in (attribute.func, *attribute.list.func):
                if function.name in names:
                    function.name = names[function.name]


def iterate_called_functions(node: NodeDef) -> Iterator[str]:
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


def find_reachable_parts(
    graph: GraphDef, nodes: Iterable[str], functions: Iterable[str] = ()
) -> tuple[set[str], set[str]]:
    """Return the nodes of a graph and functions of its library that run if the given ones run."""
    by_name = {node.name: node for node in graph.node}
    live = transitive_closure(nodes, by_name, lambda name: map(get_node_name, by_name[name].input))
    calls = [
        *functions,
        *(name for node in live for name in iterate_called_functions(by_name[node])),
    ]
    return live, _find_reachable_functions(graph.library, calls)


def _find_reachable_functions(library: FunctionDefLibrary, calls: Iterable[str]) -> set[str]:
    """Return the functions of a library that run when the given ones run, with gradients."""
    by_name = {function.signature.name: function for function in library.function}
    gradients: dict[str, list[str]] = {}
    for gradient in library.gradient:
        gradients.setdefault(gradient.function_name, []).append(gradient.gradient_func)

    def iterate_needed_functions(name: str) -> Iterator[str]:
        yield from gradients.get(name, [])
        for node in by_name[name].node_def:
            yield from iterate_called_functions(node)

    return transitive_closure(calls, by_name, iterate_needed_functions)


def transitive_closure(
    roots: Iterable[str], known: Container[str], needed: Callable[[str], Iterable[str]]
) -> set[str]:
    """Return all known names that the roots lead to, directly or not, roots included."""
    names: set[str] = set()
    waiting = list(roots)
    while waiting:
        name = waiting.pop()
        if name not in names and name in known:
            names.add(name)
            waiting += needed(name)
    return names


def select_used_functions(
    library: FunctionDefLibrary, nodes: Iterable[NodeDef]
) -> FunctionDefLibrary:
    """Return a library of only the functions that the nodes call or pass on."""
    run = _find_reachable_functions(
        library, (name for node in nodes for name in iterate_called_functions(node))
    )
    return FunctionDefLibrary(
        function=(f for f in library.function if f.signature.name in run),
        gradient=(g for g in library.gradient if g.function_name in run),
    )


def drop_unreachable(graph: GraphDef, roots: Iterable[str]) -> None:
    """Drop the nodes that no root tensor needs, and the functions that no node calls, in place.

    If there are no roots, or if any is missing, every node with an unread result is a root.
    """
    names = {node.name for node in graph.node}
    sinks = set(map(get_node_name, roots))
    if not sinks or not sinks <= names:
        sinks = _find_sinks(graph)
    needed, _ = find_reachable_parts(graph, sinks)
    nodes = [node for node in graph.node if node.name in needed]
    if len(nodes) < len(graph.node):
        del graph.node[:]
        graph.node.extend(nodes)
    graph.library.CopyFrom(select_used_functions(graph.library, graph.node))


def _find_sinks(graph: GraphDef) -> set[str]:
    """Return the nodes with unread results; nodes of unknown op types count."""
    consumed = {get_node_name(t) for node in graph.node for t in node.input if not is_control(t)}
    sinks = set()
    for node in graph.node:
        definition = op_def_registry.get(node.op)
        if node.name not in consumed and (definition is None or definition.output_arg):
            sinks.add(node.name)
    return sinks


def in_loops(graph: TensorGraph) -> frozenset[str]:
    """Return all nodes from an Enter to an Exit, both included.

    These nodes cannot be fetched, and their constants must be tied to an iteration.
    """
    within = find_frames(graph)
    ends = {
        name
        for name, node in graph.nodes.items()
        if get_op_role(node) is Role.EXIT and get_node_name(node.input[0]) in within
    }
    return frozenset(within) | ends


def find_frames(graph: TensorGraph) -> dict[str, str]:
    """Return node → the loop (`frame_name`) of its results, for nodes within loops.

    The results of an Exit belong to the frame around the loop.
    """
    loops = {
        name: node.attr["frame_name"].s.decode()
        for name, node in graph.nodes.items()
        if get_op_role(node) is Role.ENTER
    }
    if not loops:
        return {}
    consumers = graph.find_consumers()
    around: dict[str, str] = {}  # loop → enclosing loop
    waiting = list(loops)
    ends: list[str] = []
    while waiting:
        name = waiting.pop()
        for reader, _ in consumers[name]:
            role = get_op_role(graph.nodes[reader])
            if role is Role.ENTER:
                around[loops[reader]] = loops[name]
            elif role is Role.EXIT:
                ends.append(reader)
            elif reader not in loops:
                loops[reader] = loops[name]
                waiting.append(reader)
        if not waiting:
            resolved = [
                e for e in ends if e not in loops and _get_enclosing_loop(graph, e, loops) in around
            ]
            loops.update({end: around[_get_enclosing_loop(graph, end, loops)] for end in resolved})
            waiting.extend(resolved)
    return loops


def _get_enclosing_loop(graph: TensorGraph, end: str, loops: Mapping[str, str]) -> str:
    return loops[get_node_name(graph.nodes[end].input[0])]


@dataclass(frozen=True)
class Loop:
    """A loop frame: its LoopCond, the enclosing frame if any, and its parallel iterations."""

    condition: str
    around: str
    parallel: int


def map_frame_loops(graph: TensorGraph, within: Mapping[str, str]) -> dict[str, Loop]:
    """Return frame name → its loop, given the result of `find_frames`."""
    nodes = {name: graph.nodes[name] for name in within}
    conditions = {
        within[name]: name
        for name, node in nodes.items()
        if get_op_role(node) is Role.LOOP_CONDITION
    }
    entered = {within[n]: node for n, node in nodes.items() if get_op_role(node) is Role.ENTER}
    return {
        frame: Loop(
            conditions.get(frame, ""),
            within.get(get_node_name(node.input[0]), ""),
            node.attr["parallel_iterations"].i,
        )
        for frame, node in entered.items()
    }


def in_bodies(graph: TensorGraph) -> frozenset[str]:
    """Return the ops that run exactly once per iteration of a loop, behind its condition.

    Ops in a branch within the loop, and behind such a branch, are left out.
    """
    within, consumers = find_frames(graph), graph.find_consumers()
    starts = [
        reader
        for name, node in graph.nodes.items()
        if get_op_role(node) is Role.SWITCH
        and get_op_role(graph[node.input[1]]) is Role.LOOP_CONDITION
        for reader, position in consumers[name]
        if get_output_index(graph.nodes[reader].input[position]) == 1
    ]
    inner = {name for name in within if graph.nodes[name].op not in CONTROL_FLOW}
    return frozenset(
        transitive_closure(starts, inner, lambda name: (r for r, _ in consumers[name]))
    )


#: Attribute that requests inlining from the runtime.
_LOWER = "_lower_using_switch_merge"
#: Name of an op in the body of a loop or branch.
_BODY = re.compile(r"^(?P<caller>.+?)/(?P<part>body|cond|then|else|branch\d+)/_\d+/(?P<rest>.+)$")


def request_inlining(nodes: Iterable[NodeDef], library: FunctionDefLibrary) -> None:
    """Request inlining of loops and branches, also in functions, from the runtime, in place."""
    for node in chain(nodes, *(function.node_def for function in library.function)):
        if get_op_role(node) is Role.FUNCTIONAL:
            node.attr[_LOWER].b = True


def inline_control_flow(
    graph: TensorGraph, inputs: Collection[str], outputs: Collection[str]
) -> TensorGraph:
    """Return the graph with the bodies of its loops and branches inlined.

    Raises:
        tf.errors.OpError: the runtime refuses the graph.
    """
    if not any(get_op_role(node) is Role.FUNCTIONAL for node in graph.nodes.values()):
        return _with_short_names(graph, [*inputs, *outputs])
    marked = TensorGraph(dict(graph.nodes), graph.versions, deepcopy(graph.library))
    edited = [
        marked.edit_node(name)
        for name, node in graph.nodes.items()
        if get_op_role(node) is Role.FUNCTIONAL
    ]
    request_inlining(edited, marked.library)
    passed = optimize_graph(marked, ("function",), inputs, outputs)
    return _with_short_names(passed, [*inputs, *outputs])


def _with_short_names(graph: TensorGraph, ports: Iterable[str]) -> TensorGraph:
    """Return the graph with short names, which mention each body once; ports keep their names."""
    names: dict[str, str] = {}
    used, protected = set(graph.nodes), set(map(get_node_name, ports))
    for name in graph.nodes:
        short = _shorten_scoped_name(name)
        if short != name and short not in used and name not in protected:
            names[name] = short
            used.add(short)
    return graph.rename_nodes(names)


def _shorten_scoped_name(name: str) -> str:
    """Shorten `a/while/body/_1/a/while/cell/MatMul` to `a/while/body/cell/MatMul`, recursively."""
    match = _BODY.match(name)
    if match is None:
        return name
    caller, inner = match["caller"], match["rest"]
    around = "/".join(part for part in caller.split("/") if part not in ("body", "cond"))
    rest = _shorten_scoped_name(inner.removeprefix(f"{around}/"))
    return f"{caller}/{match['part']}/{rest}"
