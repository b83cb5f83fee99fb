"""Computing what a graph computes from constants alone, and merging what it computes twice."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.nodes import (
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
    plain,
    result_dtypes,
    without_large,
)
from neural_mp.adaptors.tensorflow.runtime import Runner, imported, offline_passes

#: The runtime's own passes. Not `arithmetic`: it merges additions, which hides residual sums.
_PASSES = ("pruning", "function", "constfold", "dependency")
#: A result larger than this many times what it is made of stays computed.
_MOST_GROWTH = 4


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
    passed = passed.pruned(outputs, inputs)
    _compute_constants(passed, frozenset(map(node_of, outputs)))
    return passed.pruned(outputs, inputs)


def is_pure(node: NodeDef) -> bool:
    """Whether a node gives the same results for the same inputs, and does nothing else."""
    if node.op in CONTROL_FLOW:
        return False
    definition = op_def_registry.get(node.op)
    controlled = any(map(is_control, node.input))
    return definition is not None and not definition.is_stateful and not controlled


def _compute_constants(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Replace what is computed from constants by its value."""
    known = {name for name, node in graph.nodes.items() if node.op == CONSTANT}
    computed = []
    for name, node in graph.nodes.items():
        foldable = (
            node.op not in (CONSTANT, *PLACEHOLDERS)
            and name not in outputs
            and len(node.input) > 0
            and len(result_dtypes(node)) == 1
            and result_dtypes(node)[0] not in (tf.variant, tf.resource)
            and is_pure(node)
        )
        if foldable and all(node_of(tensor) in known for tensor in node.input):
            known.add(name)
            computed.append(name)
    inner, consumers = set(computed), graph.consumers()
    wanted = [
        name for name in computed if any(reader not in inner for reader, _ in consumers[name])
    ]
    if not wanted:
        return
    part = graph.pruned(wanted)
    most = _MOST_GROWTH * sum(map(constant_bytes, part.nodes.values())) + LARGE
    values = Runner(imported(part.to_graph_def()), optimized=False)({}, wanted)
    for name, value in zip(wanted, values, strict=True):
        if np.asarray(value).nbytes <= most and np.asarray(value).dtype != object:
            graph.add(make_constant(name, value))


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
