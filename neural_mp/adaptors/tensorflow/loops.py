"""Ops in loops written as dataflow (Enter, NextIteration, Exit), and in their bodies."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONTROL_FLOW,
    TensorGraph,
    node_of,
    output_of,
)

ENTERS = ("Enter", "RefEnter")
EXITS = ("Exit", "RefExit")
SWITCHES = ("Switch", "RefSwitch", "_SwitchN")


def in_loops(graph: TensorGraph) -> frozenset[str]:
    """Everything behind an Enter and before an Exit, those two included.

    Nothing is fetched from there, and every constant needs to be tied to an iteration.
    """
    within = frames(graph)
    ends = {
        name
        for name, node in graph.nodes.items()
        if node.op in EXITS and node_of(node.input[0]) in within
    }
    return frozenset(within) | ends


def frames(graph: TensorGraph) -> dict[str, str]:
    """Node → the loop (`frame_name`) that its results lie in; nodes outside of loops are left out.

    The results of an Exit lie where the loop itself does.
    """
    found = {
        name: node.attr["frame_name"].s.decode()
        for name, node in graph.nodes.items()
        if node.op in ENTERS
    }
    if not found:
        return {}
    consumers = graph.consumers()
    around: dict[str, str] = {}  # loop → loop that it lies in
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
    """Return the ops that run once in every iteration of a loop: those its condition lets in.

    Left out are what a branch within the loop runs in some iterations only, and what lies behind.
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
