"""Inlining of branches whose condition is constant."""

from __future__ import annotations

import numpy as np

from neural_mp.adaptors.tensorflow.tensor_graph import (
    NodeDef,
    TensorGraph,
    data_inputs,
    is_control,
    node_of,
    output_of,
    plain,
)


def take_constant_branches(graph: TensorGraph) -> None:
    """Connect the taken branches of constant conditions directly to the graph, in place.

    Branches not taken stay in the graph unread.
    """
    taken = {
        name: index
        for name, node in graph.nodes.items()
        if node.op in ("Switch", "_SwitchN") and (index := _index(graph, node)) is not None
    }
    if not taken:
        return
    dead = _dead(graph, taken)
    replaced = {
        plain(f"{name}:{index}"): plain(graph.nodes[name].input[0])
        for name, index in taken.items()
        if name not in dead
    }
    for name, node in list(graph.nodes.items()):
        living = [t for t in data_inputs(node) if not _is_dead(t, taken, dead)]
        if node.op != "Merge" or name in dead or len(living) == len(data_inputs(node)):
            continue
        if len(living) == 1:
            replaced[name] = living[0]
            place = np.int32(data_inputs(node).index(living[0]))
            replaced[f"{name}:1"] = graph.put_constant(f"{name}/taken", place)
    for tensor in replaced:
        while replaced[tensor] in replaced:
            replaced[tensor] = replaced[replaced[tensor]]
    graph.redirect(replaced)
    _wait_for_what_is_taken(graph, replaced)


def _wait_for_what_is_taken(graph: TensorGraph, replaced: dict[str, str]) -> None:
    """Redirect control inputs on unread Switches and Merges to the nodes they passed on."""
    waits = {f"^{t}": f"^{node_of(s)}" for t, s in replaced.items() if ":" not in t}
    for name, node in list(graph.nodes.items()):
        if any(tensor in waits for tensor in node.input):
            edited = graph.edit(name)
            edited.input[:] = [waits.get(tensor, tensor) for tensor in edited.input]


def _index(graph: TensorGraph, switch: NodeDef) -> int | None:
    """Return the index of a Switch's live result; None if the condition is computed."""
    value = graph.constant(switch.input[1])
    if value is None or graph[switch.input[1]].input:
        return None
    if switch.op == "Switch":
        return int(bool(value))
    last = int(switch.attr["num_outs"].i) - 1
    return int(value) if 0 <= int(value) < last else last


def _is_dead(tensor: str, taken: dict[str, int], dead: set[str]) -> bool:
    source = node_of(tensor)
    return source in dead or (source in taken and output_of(tensor) != taken[source])


def _dead(graph: TensorGraph, taken: dict[str, int]) -> set[str]:
    """Return the nodes that never run: those that need a dead result, except live Merges."""
    consumers = graph.consumers()
    dead: set[str] = set()
    waiting = list(taken)
    while waiting:
        for reader, _ in consumers[waiting.pop()]:
            node = graph.nodes[reader]
            inputs = [_is_dead(t, taken, dead) for t in node.input if not is_control(t)]
            controls = [node_of(t) in dead for t in node.input if is_control(t)]
            gone = all(inputs) if node.op == "Merge" else any(inputs)
            if reader not in dead and (gone or any(controls)):
                dead.add(reader)
                waiting.append(reader)
    return dead
