"""From a frozen graph to one in which every layer is one op with its bias behind it.

Every step leaves the graph computing the same numbers, but for rounding: the order in which
constants are multiplied changes.
"""

from __future__ import annotations

import logging

import tensorflow as tf

from neural_mp.adaptors.tensorflow.conditionals import take_constant_branches
from neural_mp.adaptors.tensorflow.constant_folding import (
    compute_constants,
    merge_duplicates,
    simplified,
)
from neural_mp.adaptors.tensorflow.control_flow_lowering import lowered
from neural_mp.adaptors.tensorflow.dense import canonical_dense_layers
from neural_mp.adaptors.tensorflow.function_constants import read_constants, tie_constants
from neural_mp.adaptors.tensorflow.functions import with_functions_of_its_own
from neural_mp.adaptors.tensorflow.layer_folding import fold_affine_chains, fold_paddings
from neural_mp.adaptors.tensorflow.served_signature import ServedSignature
from neural_mp.adaptors.tensorflow.shape_inference import shapes
from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONTROL_FLOW,
    TensorGraph,
    data_inputs,
    is_control,
    node_of,
    output_of,
    plain,
    result_dtypes,
    without_places,
)

logger = logging.getLogger(__name__)

#: Ops that pass a tensor on.
_IDENTITIES = ("Identity", "StopGradient", "PreventGradient", "Snapshot")


def prepare(graph: TensorGraph, signature: ServedSignature) -> tuple[TensorGraph, list[str]]:
    """Bring a frozen graph into the form everything else works on.

    Returns:
        The graph, and warnings about what could not be done.
    """
    inputs, outputs = signature.input_tensors, signature.output_tensors
    warnings: list[str] = []
    graph = without_places(graph)
    try:
        graph = without_places(lowered(graph, inputs, outputs))
        graph = simplified(graph, inputs, outputs)
    except (tf.errors.OpError, ValueError) as error:
        logger.debug("offline passes failed", exc_info=True)
        graph = graph.pruned(outputs, inputs)
        warnings.append(
            f"TensorFlow could not fold the constants of the graph, which goes on as it is: "
            f"{str(error).splitlines()[0]}"
        )
    kept = frozenset(map(node_of, outputs))
    take_constant_branches(graph)
    read_constants(graph)
    graph = graph.pruned(outputs, inputs)
    compute_constants(graph, kept)
    strip_identities(graph, kept)
    graph = graph.pruned(outputs, inputs)
    merge_duplicates(graph, kept)
    canonical_dense_layers(graph, kept)
    graph = graph.pruned(outputs, inputs)
    fold_affine_chains(graph, kept)
    fold_paddings(graph, shapes(graph))
    tie_constants(graph)
    name_every_result(graph)
    return with_functions_of_its_own(graph.pruned(outputs, inputs)), warnings


def strip_identities(graph: TensorGraph, outputs: frozenset[str]) -> None:
    """Let readers of an op that passes a tensor on read that tensor."""
    consumers = graph.consumers()
    replaced: dict[str, str] = {}
    for name, node in graph.nodes.items():
        if node.op not in _IDENTITIES or name in outputs or len(node.input) != 1:
            continue
        beside = [graph[node.input[0]], *(graph[reader] for reader, _ in consumers[name])]
        controls = any(is_control(graph.nodes[r].input[place]) for r, place in consumers[name])
        if not controls and not any(near.op in CONTROL_FLOW for near in beside):
            replaced[name] = plain(node.input[0])
    for name in replaced:
        while replaced[name] in replaced:
            replaced[name] = replaced[replaced[name]]
    graph.redirect(replaced)


def name_every_result(graph: TensorGraph) -> None:
    """Put an Identity behind the results of ops that have several.

    From here on a node's name is its tensor's name, which is how plans speak of tensors. Batch
    norms are left out: of their results only the first is ever read.
    """
    named: dict[str, str] = {}
    for node in list(graph.nodes.values()):
        for tensor in data_inputs(node):
            source = graph[tensor]
            border = source.op in CONTROL_FLOW and (
                source.op != "Switch" or node.op in CONTROL_FLOW
            )
            kinds = [] if border else result_dtypes(source)
            if len(kinds) < 2 or "Norm" in source.op or tensor in named:
                continue
            index = output_of(tensor)
            name = f"{source.name}/result_{index}"
            named[tensor] = graph.put("Identity", name, [tensor], T=kinds[index])
    graph.redirect(named, unless=named.values())
