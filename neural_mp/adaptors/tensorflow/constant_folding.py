"""Computing what a graph computes from constants alone, and merging what it computes twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.runtime import Runner, imported, offline_passes
from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONSTANT,
    CONTROL_FLOW,
    LARGE,
    PLACEHOLDERS,
    NodeDef,
    TensorGraph,
    constant_bytes,
    is_control,
    make_constant,
    node_of,
    output_of,
    plain,
    result_dtypes,
    without_large,
)

#: The runtime's own passes. Not `arithmetic`: it merges additions, which hides residual sums.
_PASSES = ("pruning", "function", "constfold", "dependency")
#: A result larger than this many times what it is made of stays computed.
_MOST_GROWTH = 4
#: How `constfold` begins the names of Identities behind Switches, which constants of a branch wait
#: for. Where it meets such a name again, it takes the node for one that reads the Switch itself.
_RESERVED = "ConstantFoldingCtrl/"


def simplified(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """The graph after the runtime's offline passes, and with all its constants computed.

    Raises:
        tf.errors.OpError: a pass refuses the graph.
    """
    small, large = without_large(graph)
    passed = TensorGraph.from_graph_def(offline_passes(small, _PASSES, inputs, outputs))
    for name, node in large.items():
        if name in passed:
            passed.add(node)
    passed = _without_reserved_names(passed.pruned(outputs, inputs), [*inputs, *outputs])
    compute_constants(passed, frozenset(map(node_of, outputs)))
    return passed.pruned(outputs, inputs)


def _without_reserved_names(graph: TensorGraph, ports: Iterable[str]) -> TensorGraph:
    """The graph with names of its own for what `constfold` put behind Switches.

    Under the reserved names, a later run of the pass would tie such a node to what it reads as
    soon as something lies between the Switch and the node: a cycle, which the runtime survives or
    not.

    Args:
        graph: the graph.
        ports: tensors fed and fetched, whose nodes keep their names.
    """
    kept = set(map(node_of, ports))
    return graph.renamed(
        {
            name: graph.unused(name.removeprefix(_RESERVED))
            for name in graph.nodes
            if name.startswith(_RESERVED) and name not in kept
        }
    )


def is_pure(node: NodeDef) -> bool:
    """Whether a node gives the same results for the same inputs, and does nothing else."""
    if node.op in CONTROL_FLOW:
        return False
    definition = op_def_registry.get(node.op)
    controlled = any(map(is_control, node.input))
    return definition is not None and not definition.is_stateful and not controlled


def compute_constants(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Replace what is computed from constants by its value, in place.

    A constant that waits for the body of a loop or branch makes constants that wait for the same.
    """
    # Constant, or node computed from constants → what it waits for.
    waits = {
        name: [tensor for tensor in node.input if is_control(tensor)]
        for name, node in graph.nodes.items()
        if node.op == CONSTANT
    }
    computed: list[str] = []
    for name, node in graph.nodes.items():
        if name in outputs or not _is_foldable(node):
            continue
        if all(node_of(tensor) in waits for tensor in node.input):
            found = {tuple(waits[node_of(tensor)]) for tensor in node.input} - {()}
            if len(found) <= 1:
                waits[name] = list(found.pop()) if found else []
                computed.append(name)
    inner = set(computed)
    wanted = dict.fromkeys(
        plain(tensor)
        for name, node in graph.nodes.items()
        if name not in inner
        for tensor in node.input
        if node_of(tensor) in inner and not is_control(tensor)
    )
    if not wanted:
        return
    part = TensorGraph({name: graph.nodes[name] for name in waits}, graph.versions, graph.library)
    for name in [name for name in waits if part.nodes[name].op == CONSTANT and waits[name]]:
        del part.edit(name).input[:]
    part = part.pruned(wanted)
    most = _MOST_GROWTH * sum(map(constant_bytes, part.nodes.values())) + LARGE
    values = Runner(imported(part.to_graph_def()), optimized=False)({}, list(wanted))
    replaced: dict[str, str] = {}
    for tensor, value in zip(wanted, values, strict=True):
        if np.asarray(value).nbytes > most or np.asarray(value).dtype == object:
            continue
        node = graph[tensor]
        alone = len(result_dtypes(node)) == 1
        name = node.name if alone else graph.unused(f"{node.name}/result_{output_of(tensor)}")
        constant = make_constant(name, value)
        constant.input.extend(waits[node.name])
        graph.add(constant)
        if not alone:
            replaced[tensor] = name
    graph.redirect(replaced)


def _is_foldable(node: NodeDef) -> bool:
    dtypes = result_dtypes(node)
    return (
        node.op not in (CONSTANT, *PLACEHOLDERS)
        and len(node.input) > 0
        and len(dtypes) > 0
        and not {tf.variant, tf.resource} & set(dtypes)
        and is_pure(node)
    )


def merge_duplicates(graph: TensorGraph, kept: Iterable[str]) -> None:
    """Let everything that is computed twice be computed once.

    The runtime does so when it starts; done here, the graph that is converted is the one that
    runs, and nothing that was thought to have one reader turns out to have two.
    """
    first: dict[bytes, str] = {}
    replaced: dict[str, str] = {}
    stay = frozenset(kept)
    for name, node in graph.nodes.items():
        if node.op in PLACEHOLDERS or name in stay or not is_pure(node):
            continue
        digest = hashlib.sha256(node.op.encode())
        for tensor in node.input:
            source = node_of(tensor)
            digest.update(
                f"{plain(tensor).replace(source, replaced.get(source, source))};".encode()
            )
        for key in sorted(node.attr):
            if not key.startswith("_"):
                digest.update(key.encode())
                digest.update(node.attr[key].SerializeToString(deterministic=True))
        known = first.setdefault(digest.digest(), name)
        if known != name:
            replaced[name] = known
    read = {tensor for node in graph.nodes.values() for tensor in node.input}
    graph.redirect(
        {
            plain(tensor): tensor.replace(source, replaced[source], 1)
            for tensor in read
            if (source := node_of(tensor)) in replaced
        }
    )
