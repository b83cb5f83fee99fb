"""Constant conditions of branches, and constants in the bodies of loops and branches.

A body reads outside tensors only through its loop or branch. A constant in a body instead has a
control input on a node of the body: the constant exists whenever the body runs, and is recognized
as constant.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.graph.control_flow import frames, loops_of
from neural_mp.adaptors.tensorflow.graph.ops import Role, role_of
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    Consumers,
    NodeDef,
    TensorGraph,
    copied,
    data_inputs,
    is_control,
    node_of,
    output_of,
    plain,
    result_dtypes,
)


def read_constants(graph: TensorGraph) -> None:
    """Replace constants passed through loops and branches by constants in the bodies, in place.

    A weight passed as a loop variable looks like a result of the loop, and costs time in every
    iteration.
    """
    while replaced := _handed_on(graph):
        graph.redirect(replaced)
        idle = {f"^{tensor}" for tensor in replaced if ":" not in tensor}
        while idle:  # drop control inputs on nodes that no longer pass a constant on
            waiting = [name for name, n in graph.nodes.items() if idle.intersection(n.input)]
            for name in waiting:
                edited = graph.edit(name)
                edited.input[:] = [tensor for tensor in edited.input if tensor not in idle]
            nodes = (graph.nodes[name] for name in waiting)
            idle = {
                f"^{node.name}"
                for node in nodes
                if role_of(node) is Role.NOTHING and not node.input
            }


def tie_constants(graph: TensorGraph) -> None:
    """Tie outside constants read within a loop to the loop's body, in place."""
    within = frames(graph)
    if not within:
        return
    loops = loops_of(graph, within)
    # An Enter reads its input outside of the loop.
    where = {
        name: loops[loop].around if role_of(graph.nodes[name]) is Role.ENTER else loop
        for name, loop in within.items()
    }
    pivots, readers = _Pivots(graph), graph.consumers()
    tied: dict[tuple[str, str], str] = {}
    for name, loop in where.items():
        node = graph.nodes[name]
        for position, tensor in enumerate(node.input if loop else ()):
            source = node_of(tensor)
            key = source, loop
            if is_control(tensor) or source in within or not graph.is_constant(source):
                continue
            if key not in tied:
                exclusive = all(where.get(reader) == loop for reader, _ in readers[source])
                tied[key] = source if exclusive else graph.unused(f"{source}/within")
                _put(
                    graph, tied[key], graph.nodes[source], pivots.of_body(loops[loop].condition, 1)
                )
            graph.edit(name).input[position] = tied[key]


def _put(graph: TensorGraph, name: str, constant: NodeDef, pivot: str) -> str:
    node = copied(constant, name)
    node.input[:] = [f"^{pivot}"]
    return graph.add(node)


def _handed_on(graph: TensorGraph) -> dict[str, str]:
    """Return tensor that passes a constant on in a loop or branch → the constant to read."""
    pivots, consumers = _Pivots(graph), graph.consumers()
    replaced: dict[str, str] = {}
    for switch in [n for n in graph.nodes.values() if role_of(n) is Role.SWITCH]:
        constant, condition = _invariant(graph, switch), switch.input[1]
        if constant is None:
            continue
        loop = role_of(graph[condition]) is Role.LOOP_CONDITION
        for index in (1,) if loop else range(_count_branches(switch)):
            passed = _passed_on(graph, consumers, plain(f"{switch.name}:{index}"))
            if passed:
                name = graph.unused(f"{constant.name}/within")
                tied = _put(graph, name, constant, pivots.of_body(condition, index))
                replaced |= dict.fromkeys(passed, tied)
        if loop:
            ends = (reader for reader, _ in consumers[switch.name])
            replaced |= {
                end: str(constant.name) for end in ends if role_of(graph.nodes[end]) is Role.EXIT
            }
    return replaced


def _passed_on(graph: TensorGraph, consumers: Consumers, tensor: str) -> list[str]:
    """Return a tensor if it is read, and the Identities that pass it on within the body."""
    readers = [
        graph.nodes[name]
        for name, position in consumers[node_of(tensor)]
        if plain(graph.nodes[name].input[position]) == tensor
    ]
    tensors = [tensor] if readers else []
    for reader in readers:
        if role_of(reader) is Role.IDENTITY:
            tensors += [str(reader.name), *_passed_on(graph, consumers, str(reader.name))]
    return tensors


def _invariant(graph: TensorGraph, switch: NodeDef) -> NodeDef | None:
    """Return the constant that enters a loop or branch by a Switch and never changes, if any."""
    source = graph[switch.input[0]]
    if source.op == CONSTANT:
        return source
    condition = graph[switch.input[1]]
    if (role_of(source), role_of(condition)) != (Role.MERGE, Role.LOOP_CONDITION):
        return None
    entered, following = (graph[tensor] for tensor in source.input[:2])
    if (role_of(entered), role_of(following)) != (Role.ENTER, Role.NEXT_ITERATION):
        return None
    carried = plain(following.input[0])
    while role_of(graph[carried]) is Role.IDENTITY:
        carried = plain(graph[carried].input[0])
    outside = graph[entered.input[0]]
    return outside if carried == f"{switch.name}:1" and outside.op == CONSTANT else None


class _Pivots:
    """Nodes that run exactly when a body runs."""

    def __init__(self, graph: TensorGraph) -> None:
        self.graph = graph
        self._found: dict[tuple[str, int], str] = {}

    def of_body(self, condition: str, index: int) -> str:
        """Return the node of the body that reads this result of the Switches on a condition."""
        key = plain(condition), index
        if key not in self._found:
            self._found[key] = self._made(*key)
        return self._found[key]

    def _made(self, condition: str, index: int) -> str:
        """Return the node in use as control input if there is one, else a new one."""
        carriers = list(self._carriers(condition)) or [self._put_carrier(condition)]
        results = {plain(f"{carrier.name}:{index}") for carrier in carriers}
        names = [
            str(node.name)
            for node in self.graph.nodes.values()
            if role_of(node) is Role.IDENTITY
            and len(node.input) == 1
            and plain(node.input[0]) in results
        ]
        awaited = {tensor for node in self.graph.nodes.values() for tensor in node.input}
        if names:
            return next((name for name in names if f"^{name}" in awaited), names[0])
        first = carriers[0]
        kind, source = tf.as_dtype(first.attr["T"].type), plain(f"{first.name}:{index}")
        return self.graph.put("Identity", f"{first.name}/pivot_{index}", [source], T=kind)

    def _carriers(self, condition: str) -> Iterator[NodeDef]:
        """Yield Switches that stay: on the condition itself, or on loop variables that change."""
        loop = role_of(self.graph[condition]) is Role.LOOP_CONDITION
        for node in self.graph.nodes.values():
            if role_of(node) is Role.SWITCH and plain(node.input[1]) == condition:
                changes = loop and _invariant(self.graph, node) is None
                if changes or plain(node.input[0]) == condition:
                    yield node

    def _put_carrier(self, condition: str) -> NodeDef:
        like = next(
            node
            for node in self.graph.nodes.values()
            if role_of(node) is Role.SWITCH and plain(node.input[1]) == condition
        )
        switch = copied(like, self.graph.unused(f"{node_of(condition)}/switch"))
        switch.input[:] = [condition, condition]
        switch.attr["T"].type = result_dtypes(self.graph[condition])[0].as_datatype_enum
        return self.graph.nodes[self.graph.add(switch)]


def take_constant_branches(graph: TensorGraph) -> None:
    """Connect the taken branches of constant conditions directly to the graph, in place.

    Branches not taken stay in the graph unread.
    """
    branches = {
        name: index
        for name, node in graph.nodes.items()
        if role_of(node) is Role.SWITCH and (index := _index(graph, node)) is not None
    }
    if not branches:
        return
    dead = _dead(graph, branches)
    replaced = {
        plain(f"{name}:{index}"): plain(graph.nodes[name].input[0])
        for name, index in branches.items()
        if name not in dead
    }
    for name, node in list(graph.nodes.items()):
        living = [t for t in data_inputs(node) if not _is_dead(t, branches, dead)]
        if role_of(node) is not Role.MERGE or name in dead or len(living) == len(data_inputs(node)):
            continue
        if len(living) == 1:
            replaced[name] = living[0]
            value_index = np.int32(data_inputs(node).index(living[0]))
            replaced[f"{name}:1"] = graph.put_constant(f"{name}/taken", value_index)
    for tensor in replaced:
        while replaced[tensor] in replaced:
            replaced[tensor] = replaced[replaced[tensor]]
    # Control inputs on unread Switches and Merges wait for the nodes that these passed on.
    waits = {f"^{t}": f"^{node_of(s)}" for t, s in replaced.items() if ":" not in t}
    graph.redirect({**replaced, **waits})


def _count_branches(switch: NodeDef) -> int:
    return int(switch.attr["num_outs"].i) if "num_outs" in switch.attr else 2


def _index(graph: TensorGraph, switch: NodeDef) -> int | None:
    """Return the index of a Switch's live result; None if the condition is computed."""
    value = graph.constant(switch.input[1])
    if value is None or graph[switch.input[1]].input:
        return None
    last = _count_branches(switch) - 1
    return int(value) if 0 <= int(value) < last else last


def _is_dead(tensor: str, branches: dict[str, int], dead: set[str]) -> bool:
    source = node_of(tensor)
    return source in dead or (source in branches and output_of(tensor) != branches[source])


def _dead(graph: TensorGraph, branches: dict[str, int]) -> set[str]:
    """Return the nodes that never run: those that need a dead result, except live Merges."""
    consumers = graph.consumers()
    dead: set[str] = set()
    waiting = list(branches)
    while waiting:
        for reader, _ in consumers[waiting.pop()]:
            node = graph.nodes[reader]
            inputs = [_is_dead(t, branches, dead) for t in node.input if not is_control(t)]
            controls = [node_of(t) in dead for t in node.input if is_control(t)]
            is_blocked = all(inputs) if role_of(node) is Role.MERGE else any(inputs)
            if reader not in dead and (is_blocked or any(controls)):
                dead.add(reader)
                waiting.append(reader)
    return dead
