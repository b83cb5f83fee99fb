"""Constant folding and common subexpression elimination."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterable, Mapping

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import op_def_registry

from neural_mp.adaptors.tensorflow.graph.ops import CONTROL_FLOW, PLACEHOLDERS
from neural_mp.adaptors.tensorflow.graph.runtime import CPU, Runner, imported, optimized, runnable
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    LARGE,
    NodeDef,
    TensorGraph,
    channels_first,
    constant_bytes,
    is_control,
    make_constant,
    node_of,
    output_of,
    plain,
    result_dtypes,
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


def simplified(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """Return the graph after the runtime's offline passes and with its constants folded.

    Raises:
        tf.errors.OpError: a pass refuses the graph.
    """
    inlined = optimized(graph, _INLINING, inputs, outputs).pruned(outputs, inputs)
    if any(channels_first(node) for node in inlined.nodes.values()):
        inlined = _channels_last(inlined, inputs, outputs)
    passed = _folded_by_runtime(inlined, inputs, outputs)
    passed = _without_reserved_names(passed, [*inputs, *outputs])
    compute_constants(passed, frozenset(map(node_of, outputs)))
    return passed.pruned(outputs, inputs)


def _channels_last(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """Return the graph with channels last in image ops, between transpositions.

    Integer kernels require channels last, and so do all kernels of a TensorFlow without oneDNN. The
    runtime's own pass converts ops whose shapes it can infer.
    """
    placed = {name: node.device for name, node in graph.nodes.items() if node.device}
    free = graph.copy()
    for name in placed:
        free.edit(name).device = ""
    try:
        converted = optimized(free, ["layout"], inputs, outputs, device=CPU)
    except (tf.errors.OpError, ValueError):
        logger.debug("the layout of images is kept", exc_info=True)
        return graph
    for name, node in converted.nodes.items():
        node.device = placed.get(name, "")
    return converted.pruned(outputs, inputs)


def _folded_by_runtime(graph: TensorGraph, inputs: list[str], outputs: list[str]) -> TensorGraph:
    """Return the graph after the runtime's folding, which computes results of any size.

    A placeholder in place of an input keeps the pass from computing large results.
    """
    bounded, sources = graph.copy(), dict[str, str]()
    for name in unbounded(graph, frozenset()):
        source = plain(graph.nodes[name].input[0])
        dtype = result_dtypes(graph[source])[output_of(source)]
        placeholder = bounded.put("Placeholder", f"{name}/held", dtype=dtype)
        bounded.edit(name).input[0] = placeholder
        sources[placeholder] = source
    ports = [*outputs, *dict.fromkeys(sources.values())]
    passed = optimized(bounded, _FOLDING, [*inputs, *sources], ports)
    controls = {f"^{name}": f"^{node_of(source)}" for name, source in sources.items()}
    passed.redirect({**sources, **controls})
    return passed.pruned(outputs, inputs)


def _without_reserved_names(graph: TensorGraph, ports: Iterable[str]) -> TensorGraph:
    """Return the graph with the nodes that `constfold` put behind Switches renamed, except ports.

    A later run of the pass would tie a node with a reserved name to its input as soon as another
    node lies between the Switch and the node: a cycle that may crash the runtime.
    """
    protected = set(map(node_of, ports))
    return graph.renamed(
        {
            name: graph.unused(name.removeprefix(_RESERVED))
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
        if not _compute_known(graph, outputs):
            return


def _compute_known(graph: TensorGraph, outputs: frozenset[str]) -> bool:
    """Fold what has a known size; return whether a repetition may fold more."""
    sizes = unbounded(graph, outputs)
    waits = _constants(graph, outputs, frozenset(sizes))
    return _fold(graph, waits) and None in sizes.values()


def unbounded(graph: TensorGraph, outputs: frozenset[str]) -> dict[str, int | None]:
    """Return the nodes computed from constants whose results are large or of unknown size.

    A few bytes can describe a chain of ops whose results exceed any memory.

    Returns:
        Node → the bytes of its results; None if unknown.
    """
    waits = _constants(graph, outputs, frozenset())
    computed = [name for name in waits if graph.nodes[name].op != CONSTANT]
    if not computed:
        return {}
    part = _part(graph, waits).pruned(computed)
    sizes = _sizes(imported(part.to_graph_def()), computed)
    most = _most(graph)
    return {name: size for name, size in sizes.items() if size is None or size > most}


def _most(graph: TensorGraph) -> int:
    """Return the largest size of a folded result in bytes."""
    return _MOST_GROWTH * sum(map(constant_bytes, graph.nodes.values())) + LARGE


def _constants(
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
        if all(node_of(tensor) in waits for tensor in node.input):
            controls = {tuple(waits[node_of(tensor)]) for tensor in node.input} - {()}
            if len(controls) <= 1:
                waits[name] = list(controls.pop()) if controls else []
    return waits


def _part(graph: TensorGraph, waits: Mapping[str, list[str]]) -> TensorGraph:
    """Return the part of a graph that depends on constants only, without control inputs."""
    part = TensorGraph({name: graph.nodes[name] for name in waits}, graph.versions, graph.library)
    for name in [name for name in waits if part.nodes[name].op == CONSTANT and waits[name]]:
        del part.edit(name).input[:]
    return part


def _sizes(graph: tf.Graph, names: Iterable[str]) -> dict[str, int | None]:
    """Return node → bytes of its results by TensorFlow's shape inference; None if unknown."""
    sizes: dict[str, int | None] = {}
    for name in names:
        results = graph.get_operation_by_name(name).outputs
        counts = [result.shape.num_elements() for result in results]
        widths = [result.dtype.size for result in results]
        static = None not in counts
        sizes[name] = (
            sum(count * width for count, width in zip(counts, widths, strict=True))
            if static
            else None
        )
    return sizes


def _fold(graph: TensorGraph, waits: Mapping[str, list[str]]) -> bool:
    """Replace nodes computed from constants by their values; return whether there were any."""
    inner = {name for name in waits if graph.nodes[name].op != CONSTANT}
    tensors = dict.fromkeys(
        plain(tensor)
        for name, node in graph.nodes.items()
        if name not in inner
        for tensor in node.input
        if node_of(tensor) in inner and not is_control(tensor)
    )
    if not tensors:
        return False
    part, most = _part(graph, waits).pruned(tensors), _most(graph)
    try:
        values = Runner(runnable(part.to_graph_def()))({}, list(tensors))
    except ConversionError:
        logger.debug("constant folding failed; constants are kept", exc_info=True)
        return False
    replaced: dict[str, str] = {}
    for tensor, value in zip(tensors, values, strict=True):
        if np.asarray(value).nbytes > most:
            continue
        node = graph[tensor]
        single = len(result_dtypes(node)) == 1
        name = node.name if single else graph.unused(f"{node.name}/result_{output_of(tensor)}")
        constant = make_constant(name, value)
        constant.input.extend(waits[node.name])
        graph.add(constant)
        if not single:
            replaced[tensor] = name
    graph.redirect(replaced)
    return True


def _is_foldable(node: NodeDef) -> bool:
    dtypes = result_dtypes(node)
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
            source = node_of(tensor)
            digest.update(
                f"{plain(tensor).replace(source, replaced.get(source, source))};".encode()
            )
        for key in sorted(node.attr):
            if not key.startswith("_"):
                digest.update(key.encode())
                digest.update(node.attr[key].SerializeToString(deterministic=True))
        original = first.setdefault(digest.digest(), name)
        if original != name:
            replaced[name] = original
    operands = {tensor for node in graph.nodes.values() for tensor in node.input}
    graph.redirect(
        {
            plain(tensor): tensor.replace(source, replaced[source], 1)
            for tensor in operands
            if (source := node_of(tensor)) in replaced
        }
    )
