"""Which ops lie in loops written as dataflow (Enter, NextIteration, Exit)."""

from __future__ import annotations

from neural_mp.adaptors.tensorflow.nodes import TensorGraph, node_of


def in_loops(graph: TensorGraph) -> frozenset[str]:
    """Everything behind an Enter and before an Exit, those two included.

    In there a constant needs to be tied to its iteration, and an edge may lead back: nothing is
    put in. Loops as functions (While) are single ops, whose bodies are left alone anyway.
    """
    waiting = [name for name, node in graph.nodes.items() if node.op in ("Enter", "RefEnter")]
    if not waiting:
        return frozenset()
    consumers = graph.consumers()
    found = set(waiting)
    while waiting:
        name = waiting.pop()
        if graph.nodes[name].op in ("Exit", "RefExit"):
            continue
        for reader, _ in consumers[name]:
            if reader not in found:
                found.add(reader)
                waiting.append(reader)
    # What an Enter takes in comes from outside; all else that is read in a loop lies in it.
    waiting = [name for name in found if graph.nodes[name].op not in ("Enter", "RefEnter")]
    while waiting:
        for tensor in graph.nodes[waiting.pop()].input:
            source = node_of(tensor)
            if source not in found:
                found.add(source)
                if graph.nodes[source].op not in ("Enter", "RefEnter"):
                    waiting.append(source)
    return frozenset(found)
