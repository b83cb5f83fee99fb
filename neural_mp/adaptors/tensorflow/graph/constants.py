"""Constants: folding, common subexpressions, constant conditions, and constants in bodies.

A body of a loop or branch reads outside tensors only through the loop or branch. A constant in a
body instead has a control input on a node of the body: the constant exists whenever the body runs,
and is recognized as constant.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.graph.control_flow import find_frames, map_frame_loops
from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW, PLACEHOLDERS, Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.runtime import (
    CPU,
    Runner,
    import_graph,
    import_runnable,
    optimize_graph,
)
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    LARGE,
    Consumers,
    NodeDef,
    TensorGraph,
    channels_first,
    copy_node,
    count_constant_bytes,
    get_node_name,
    get_output_index,
    is_control,
    list_data_inputs,
    list_result_dtypes,
    make_constant,
    plain_name,
)
from neural_mp.errors import ConversionError

logger = logging.getLogger(__name__)

#: The runtime's own passes. `arithmetic` would merge additions and hide residual sums.
_INLINING, _FOLDING = ("pruning", "function"), ("constfold", "dependency")
#: Upper bound of result size per operand size; larger results are not folded.
_MOST_GROWTH = 4
#: Types of results that are not folded; sizes of strings are unknown.
_UNFOLDABLE = frozenset({tf.variant, tf.resource, tf.string})
#: Repetitions of constant folding.
_MOST_ROUNDS = 3
#: Prefix of the Identities that `constfold` puts behind Switches as control inputs of a branch's
#: constants. A later run takes any node of such a name for a direct reader of the Switch.
_RESERVED = "ConstantFoldingCtrl/"


def simplify_graph(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """Return the graph after the runtime's offline passes and with its constants folded.

    Raises:
        tf.errors.OpError: a pass refuses the graph.
    """
    inlined = optimize_graph(graph, _INLINING, inputs, outputs).prune_unused(outputs, inputs)
    if any(channels_first(node) for node in inlined.nodes.values()):
        inlined = _move_channels_last(inlined, inputs, outputs)
    passed = _folded_by_runtime(inlined, inputs, outputs)
    passed = _without_reserved_names(passed, [*inputs, *outputs])
    compute_constants(passed, frozenset(map(get_node_name, outputs)))
    return passed.prune_unused(outputs, inputs)


def _move_channels_last(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """Return the graph with channels last in image ops, between transpositions.

    Integer kernels require channels last, and so do all kernels of a TensorFlow without oneDNN. The
    runtime's own pass converts ops whose shapes it can infer.
    """
    placed = {name: node.device for name, node in graph.nodes.items() if node.device}
    free = graph.copy_graph()
    for name in placed:
        free.edit_node(name).device = ""
    try:
        converted = optimize_graph(free, ["layout"], inputs, outputs, device=CPU)
    except (tf.errors.OpError, ValueError):
        logger.debug("the layout of images is kept", exc_info=True)
        return graph
    for name, node in converted.nodes.items():
        node.device = placed.get(name, "")
    return converted.prune_unused(outputs, inputs)


def _folded_by_runtime(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """Return the graph after the runtime's folding, which computes results of any size.

    A placeholder in place of an input keeps the pass from computing large results.
    """
    bounded, sources = graph.copy_graph(), dict[str, str]()
    for name in find_unbounded_results(graph, frozenset()):
        source = plain_name(graph.nodes[name].input[0])
        dtype = list_result_dtypes(graph[source])[get_output_index(source)]
        placeholder = bounded.put_node("Placeholder", f"{name}/held", dtype=dtype)
        bounded.edit_node(name).input[0] = placeholder
        sources[placeholder] = source
    ports = [*outputs, *dict.fromkeys(sources.values())]
    passed = optimize_graph(bounded, _FOLDING, [*inputs, *sources], ports)
    controls = {f"^{name}": f"^{get_node_name(source)}" for name, source in sources.items()}
    passed.redirect_readers({**sources, **controls})
    return passed.prune_unused(outputs, inputs)


def _without_reserved_names(graph: TensorGraph, ports: Iterable[str]) -> TensorGraph:
    """Return the graph with the nodes that `constfold` put behind Switches renamed, except ports.

    A later run of the pass would tie a node with a reserved name to its input as soon as another
    node lies between the Switch and the node: a cycle that may crash the runtime.
    """
    protected = set(map(get_node_name, ports))
    return graph.rename_nodes(
        {
            name: graph.unused_name(name.removeprefix(_RESERVED))
            for name in graph.nodes
            if name.startswith(_RESERVED) and name not in protected
        }
    )


def is_pure(node: NodeDef) -> bool:
    """Whether a node is deterministic and free of side effects."""
    if node.op in CONTROL_FLOW:
        return False
    definition = op_def_registry.get(node.op)
    controlled = any(map(is_control, node.input))
    return definition is not None and not definition.is_stateful and not controlled


def compute_constants(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Replace nodes computed from constants by their values, in place.

    Nodes stay if their results are large, of a size that is unknown before they run, or if they
    fail. Control inputs of a constant, on the body of a loop or branch, pass to the folded
    constants.
    """
    # Values that are computed first make more sizes known.
    for _ in range(_MOST_ROUNDS):
        sizes = find_unbounded_results(graph, outputs)
        waits = _find_foldable(graph, outputs, frozenset(sizes))
        if not _fold_constants(graph, waits) or None not in sizes.values():
            return


def find_unbounded_results(graph: TensorGraph, outputs: frozenset[str]) -> dict[str, int | None]:
    """Return the nodes computed from constants whose results are large or of unknown size.

    A few bytes can describe a chain of ops whose results exceed any memory.

    Returns:
        Node → the bytes of its results; None if unknown.
    """
    waits = _find_foldable(graph, outputs, frozenset())
    computed = [name for name in waits if graph.nodes[name].op != CONSTANT]
    if not computed:
        return {}
    part = _extract_constant_part(graph, waits).prune_unused(computed)
    sizes = _infer_result_bytes(import_graph(part.to_graph_def()), computed)
    most = _folded_nbytes_limit(graph)
    return {name: size for name, size in sizes.items() if size is None or size > most}


def _folded_nbytes_limit(graph: TensorGraph) -> int:
    return _MOST_GROWTH * sum(map(count_constant_bytes, graph.nodes.values())) + LARGE


def _find_foldable(
    graph: TensorGraph, outputs: frozenset[str], unsafe: frozenset[str]
) -> dict[str, list[str]]:
    """Return constant, or node computed from constants but not `unsafe` → its control inputs."""
    waits = {
        name: [tensor for tensor in node.input if is_control(tensor)]
        for name, node in graph.nodes.items()
        if node.op == CONSTANT
    }
    for name, node in graph.nodes.items():
        if name in outputs or name in unsafe or not _is_foldable(node):
            continue
        if all(get_node_name(tensor) in waits for tensor in node.input):
            controls = {tuple(waits[get_node_name(tensor)]) for tensor in node.input} - {()}
            if len(controls) <= 1:
                waits[name] = list(controls.pop()) if controls else []
    return waits


def _extract_constant_part(graph: TensorGraph, waits: Mapping[str, list[str]]) -> TensorGraph:
    """Return the part of a graph that depends on constants only, without control inputs."""
    part = TensorGraph({name: graph.nodes[name] for name in waits}, graph.versions, graph.library)
    for name in [name for name in waits if part.nodes[name].op == CONSTANT and waits[name]]:
        del part.edit_node(name).input[:]
    return part


def _infer_result_bytes(graph: tf.Graph, names: Iterable[str]) -> dict[str, int | None]:
    """Return node → bytes of its results by TensorFlow's shape inference; None if unknown."""
    sizes: dict[str, int | None] = {}
    for name in names:
        results = graph.get_operation_by_name(name).outputs
        pairs = [(result.shape.num_elements(), result.dtype.size) for result in results]
        is_static = all(count is not None for count, _ in pairs)
        sizes[name] = sum(count * width for count, width in pairs) if is_static else None
    return sizes


def _fold_constants(graph: TensorGraph, waits: Mapping[str, list[str]]) -> bool:
    """Replace nodes computed from constants by their values; return whether there were any."""
    inner = {name for name in waits if graph.nodes[name].op != CONSTANT}
    tensors = dict.fromkeys(
        plain_name(tensor)
        for name, node in graph.nodes.items()
        if name not in inner
        for tensor in node.input
        if get_node_name(tensor) in inner and not is_control(tensor)
    )
    if not tensors:
        return False
    part, most = (
        _extract_constant_part(graph, waits).prune_unused(tensors),
        _folded_nbytes_limit(graph),
    )
    try:
        values = Runner(import_runnable(part.to_graph_def()))({}, list(tensors))
    except ConversionError:
        logger.debug("constant folding failed; constants are kept", exc_info=True)
        return False
    replaced: dict[str, str] = {}
    for tensor, value in zip(tensors, values, strict=True):
        if np.asarray(value).nbytes > most:
            continue
        node = graph[tensor]
        single = len(list_result_dtypes(node)) == 1
        name = (
            node.name
            if single
            else graph.unused_name(f"{node.name}/result_{get_output_index(tensor)}")
        )
        constant = make_constant(name, value)
        constant.input.extend(waits[node.name])
        graph.add_node(constant)
        if not single:
            replaced[tensor] = name
    graph.redirect_readers(replaced)
    return True


def _is_foldable(node: NodeDef) -> bool:
    dtypes = list_result_dtypes(node)
    return (
        node.op not in (CONSTANT, *PLACEHOLDERS)
        and len(node.input) > 0
        and len(dtypes) > 0
        and not _UNFOLDABLE & set(dtypes)
        and is_pure(node)
    )


def merge_duplicates(graph: TensorGraph, protected: Iterable[str]) -> None:
    """Merge nodes that compute the same result.

    The runtime does so at startup. Merging here converts the graph that actually runs, in which a
    tensor cannot unexpectedly gain a second reader.
    """
    first: dict[bytes, str] = {}
    replaced: dict[str, str] = {}
    stay = frozenset(protected)
    for name, node in graph.nodes.items():
        if node.op in PLACEHOLDERS or name in stay or not is_pure(node):
            continue
        digest = hashlib.sha256(node.op.encode())
        for tensor in node.input:
            source = get_node_name(tensor)
            digest.update(
                f"{plain_name(tensor).replace(source, replaced.get(source, source))};".encode()
            )
        for key in sorted(node.attr):
            if not key.startswith("_"):
                digest.update(key.encode())
                digest.update(node.attr[key].SerializeToString(deterministic=True))
        original = first.setdefault(digest.digest(), name)
        if original != name:
            replaced[name] = original
    operands = {tensor for node in graph.nodes.values() for tensor in node.input}
    graph.redirect_readers(
        {
            plain_name(tensor): tensor.replace(source, replaced[source], 1)
            for tensor in operands
            if (source := get_node_name(tensor)) in replaced
        }
    )


def read_constants(graph: TensorGraph) -> None:
    """Replace constants passed through loops and branches by constants in the bodies, in place.

    A weight passed as a loop variable looks like a result of the loop, and costs time in every
    iteration.
    """
    while replaced := _find_passed_constants(graph):
        graph.redirect_readers(replaced)
        idle = {f"^{tensor}" for tensor in replaced if ":" not in tensor}
        while idle:  # drop control inputs on nodes that no longer pass a constant on
            waiting = [name for name, n in graph.nodes.items() if idle.intersection(n.input)]
            for name in waiting:
                edited = graph.edit_node(name)
                edited.input[:] = [tensor for tensor in edited.input if tensor not in idle]
            nodes = (graph.nodes[name] for name in waiting)
            idle = {f"^{n.name}" for n in nodes if get_op_role(n) is Role.NOTHING and not n.input}


def tie_loop_constants(graph: TensorGraph) -> None:
    """Tie outside constants read within a loop to the loop's body, in place."""
    within = find_frames(graph)
    if not within:
        return
    loops = map_frame_loops(graph, within)
    # An Enter reads its input outside of the loop.
    where = {
        name: loops[loop].around if get_op_role(graph.nodes[name]) is Role.ENTER else loop
        for name, loop in within.items()
    }
    pivots, readers = _Pivots(graph), graph.find_consumers()
    tied: dict[tuple[str, str], str] = {}
    for name, loop in where.items():
        node = graph.nodes[name]
        for position, tensor in enumerate(node.input if loop else ()):
            source = get_node_name(tensor)
            key = source, loop
            if is_control(tensor) or source in within or not graph.is_constant(source):
                continue
            if key not in tied:
                exclusive = all(where.get(reader) == loop for reader, _ in readers[source])
                tied[key] = source if exclusive else graph.unused_name(f"{source}/within")
                _tie_constant(
                    graph, tied[key], graph.nodes[source], pivots.of_body(loops[loop].condition, 1)
                )
            graph.edit_node(name).input[position] = tied[key]


def _tie_constant(graph: TensorGraph, name: str, constant: NodeDef, pivot: str) -> str:
    node = copy_node(constant, name)
    node.input[:] = [f"^{pivot}"]
    return graph.add_node(node)


def _find_passed_constants(graph: TensorGraph) -> dict[str, str]:
    """Return tensor that passes a constant on in a loop or branch → the constant to read."""
    pivots, consumers = _Pivots(graph), graph.find_consumers()
    replaced: dict[str, str] = {}
    for switch in [n for n in graph.nodes.values() if get_op_role(n) is Role.SWITCH]:
        constant, condition = _find_invariant_constant(graph, switch), switch.input[1]
        if constant is None:
            continue
        loop = get_op_role(graph[condition]) is Role.LOOP_CONDITION
        for index in (1,) if loop else range(_count_branches(switch)):
            passed = _find_passing_tensors(graph, consumers, plain_name(f"{switch.name}:{index}"))
            if passed:
                name = graph.unused_name(f"{constant.name}/within")
                tied = _tie_constant(graph, name, constant, pivots.of_body(condition, index))
                replaced |= dict.fromkeys(passed, tied)
        if loop:
            ends = (reader for reader, _ in consumers[switch.name])
            replaced |= {
                end: str(constant.name)
                for end in ends
                if get_op_role(graph.nodes[end]) is Role.EXIT
            }
    return replaced


def _find_passing_tensors(graph: TensorGraph, consumers: Consumers, tensor: str) -> list[str]:
    """Return a tensor if it is read, and the Identities that pass it on within the body."""
    readers = [
        graph.nodes[name]
        for name, position in consumers[get_node_name(tensor)]
        if plain_name(graph.nodes[name].input[position]) == tensor
    ]
    tensors = [tensor] if readers else []
    for reader in readers:
        if get_op_role(reader) is Role.IDENTITY:
            tensors += [
                str(reader.name),
                *_find_passing_tensors(graph, consumers, str(reader.name)),
            ]
    return tensors


def _find_invariant_constant(graph: TensorGraph, switch: NodeDef) -> NodeDef | None:
    """Return the constant that enters a loop or branch by a Switch and never changes, if any."""
    source = graph[switch.input[0]]
    if source.op == CONSTANT:
        return source
    condition = graph[switch.input[1]]
    if (get_op_role(source), get_op_role(condition)) != (Role.MERGE, Role.LOOP_CONDITION):
        return None
    entered, following = (graph[tensor] for tensor in source.input[:2])
    if (get_op_role(entered), get_op_role(following)) != (Role.ENTER, Role.NEXT_ITERATION):
        return None
    carried = plain_name(following.input[0])
    while get_op_role(graph[carried]) is Role.IDENTITY:
        carried = plain_name(graph[carried].input[0])
    outside = graph[entered.input[0]]
    return outside if carried == f"{switch.name}:1" and outside.op == CONSTANT else None


class _Pivots:
    """Nodes that run exactly when a body runs."""

    def __init__(self, graph: TensorGraph) -> None:
        self.graph = graph
        self._found: dict[tuple[str, int], str] = {}

    def of_body(self, condition: str, index: int) -> str:
        """Return the node of the body that reads this result of the Switches on a condition."""
        key = plain_name(condition), index
        if key not in self._found:
            self._found[key] = self._find_or_put_pivot(*key)
        return self._found[key]

    def _find_or_put_pivot(self, condition: str, index: int) -> str:
        """Return the node in use as control input if there is one, else a new one."""
        switches = [
            node
            for node in self.graph.nodes.values()
            if get_op_role(node) is Role.SWITCH and plain_name(node.input[1]) == condition
        ]
        loop = get_op_role(self.graph[condition]) is Role.LOOP_CONDITION
        # Switches that stay: on the condition itself, or on loop variables that change.
        carriers = [
            switch
            for switch in switches
            if plain_name(switch.input[0]) == condition
            or (loop and _find_invariant_constant(self.graph, switch) is None)
        ]
        if not carriers:
            carriers = [self._put_carrier(condition, switches[0])]
        results = {plain_name(f"{carrier.name}:{index}") for carrier in carriers}
        names = [
            str(node.name)
            for node in self.graph.nodes.values()
            if get_op_role(node) is Role.IDENTITY
            and len(node.input) == 1
            and plain_name(node.input[0]) in results
        ]
        awaited = {tensor for node in self.graph.nodes.values() for tensor in node.input}
        if names:
            return next((name for name in names if f"^{name}" in awaited), names[0])
        first = carriers[0]
        kind, source = tf.as_dtype(first.attr["T"].type), plain_name(f"{first.name}:{index}")
        return self.graph.put_node("Identity", f"{first.name}/pivot_{index}", [source], T=kind)

    def _put_carrier(self, condition: str, like: NodeDef) -> NodeDef:
        switch = copy_node(like, self.graph.unused_name(f"{get_node_name(condition)}/switch"))
        switch.input[:] = [condition, condition]
        switch.attr["T"].type = list_result_dtypes(self.graph[condition])[0].as_datatype_enum
        return self.graph.nodes[self.graph.add_node(switch)]


def take_constant_branches(graph: TensorGraph) -> None:
    """Connect the taken branches of constant conditions directly to the graph, in place.

    Branches not taken stay in the graph unread.
    """
    branches = {
        name: index
        for name, node in graph.nodes.items()
        if get_op_role(node) is Role.SWITCH and (index := _find_live_index(graph, node)) is not None
    }
    if not branches:
        return
    dead = _find_dead_nodes(graph, branches)
    replaced = {
        plain_name(f"{name}:{index}"): plain_name(graph.nodes[name].input[0])
        for name, index in branches.items()
        if name not in dead
    }
    for name, node in list(graph.nodes.items()):
        living = [t for t in list_data_inputs(node) if not _is_dead(t, branches, dead)]
        if (
            get_op_role(node) is not Role.MERGE
            or name in dead
            or len(living) == len(list_data_inputs(node))
        ):
            continue
        if len(living) == 1:
            replaced[name] = living[0]
            value_index = np.int32(list_data_inputs(node).index(living[0]))
            replaced[f"{name}:1"] = graph.put_constant(f"{name}/taken", value_index)
    for tensor in replaced:
        while replaced[tensor] in replaced:
            replaced[tensor] = replaced[replaced[tensor]]
    # Control inputs on unread Switches and Merges wait for the nodes that these passed on.
    waits = {f"^{t}": f"^{get_node_name(s)}" for t, s in replaced.items() if ":" not in t}
    graph.redirect_readers({**replaced, **waits})


def _count_branches(switch: NodeDef) -> int:
    return int(switch.attr["num_outs"].i) if "num_outs" in switch.attr else 2


def _find_live_index(graph: TensorGraph, switch: NodeDef) -> int | None:
    """Return the index of a Switch's live result; None if the condition is computed."""
    value = graph.find_constant(switch.input[1])
    if value is None or graph[switch.input[1]].input:
        return None
    last = _count_branches(switch) - 1
    return int(value) if 0 <= int(value) < last else last


def _is_dead(tensor: str, branches: dict[str, int], dead: set[str]) -> bool:
    source = get_node_name(tensor)
    return source in dead or (source in branches and get_output_index(tensor) != branches[source])


def _find_dead_nodes(graph: TensorGraph, branches: dict[str, int]) -> set[str]:
    """Return the nodes that never run: those that need a dead result, except live Merges."""
    consumers = graph.find_consumers()
    dead: set[str] = set()
    waiting = list(branches)
    while waiting:
        for reader, _ in consumers[waiting.pop()]:
            node = graph.nodes[reader]
            inputs = [_is_dead(t, branches, dead) for t in node.input if not is_control(t)]
            controls = [get_node_name(t) in dead for t in node.input if is_control(t)]
            is_blocked = all(inputs) if get_op_role(node) is Role.MERGE else any(inputs)
            if reader not in dead and (is_blocked or any(controls)):
                dead.add(reader)
                waiting.append(reader)
    return dead
