"""A TensorFlow graph as ops and edges that everything framework-neutral works on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.tensorflow.clusters import Cluster, find_clusters, non_negative
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import (
    CONSTANT,
    NodeDef,
    TensorGraph,
    data_inputs,
    integers_attribute,
    node_of,
    text_attribute,
)
from neural_mp.graph import Op, OpGraph

#: Layers whose integer kernel cannot write floats.
CONVOLUTIONS = ("Conv2D", "DepthwiseConv2dNative")
#: Ops that move or select values, and how many tensors they do it with; the rest of their inputs
#: says how, and must be constant. None: all inputs but the last.
CARRIERS: Mapping[str, int | None] = {
    **dict.fromkeys(("Reshape", "Squeeze", "ExpandDims", "Transpose", "Slice", "StridedSlice"), 1),
    **dict.fromkeys(("MaxPool", "AvgPool", "Pad", "SpaceToDepth", "DepthToSpace"), 1),
    **dict.fromkeys(("SpaceToBatchND", "BatchToSpaceND", "ResizeNearestNeighbor"), 1),
    "ConcatV2": None,
}
#: Averages over larger windows are too fine for the steps of what they average.
_LARGEST_AVERAGE = 9


@dataclass(frozen=True)
class Anatomy:
    """What a graph is made of, as far as INT8 is concerned.

    Attributes:
        clusters: layer → what its kernel can run along.
        carriers: ops that pass INT8 on → the tensors they move.
        non_negative: nodes whose results are never negative.
    """

    clusters: Mapping[str, Cluster]
    carriers: Mapping[str, tuple[str, ...]]
    non_negative: frozenset[str]


def anatomy(model: TensorFlowModel) -> Anatomy:
    """Take a model's graph apart."""
    graph = model.graph
    carriers = {
        name: moved
        for name, node in graph.nodes.items()
        if (moved := _moved(graph, node)) and _has_rank(model, name)
    }
    clusters = find_clusters(graph, model.output_nodes, model.shapes)
    return Anatomy(clusters, carriers, non_negative(graph))


def _moved(graph: TensorGraph, node: NodeDef) -> tuple[str, ...]:
    """The tensors that an op moves without changing them; none where it does more."""
    if node.op not in CARRIERS or ("T" not in node.attr and node.op != CONSTANT):
        return ()
    tensors = data_inputs(node)
    count = CARRIERS[node.op]
    moved = tensors[:-1] if count is None else tensors[:count]
    if any(":" in tensor or graph.constant(tensor) is not None for tensor in moved):
        return ()
    if any(graph.constant(tensor) is None for tensor in tensors[len(moved) :]):
        return ()
    if text_attribute(node, "data_format").startswith("NCHW"):
        return ()
    if node.op in ("MaxPool", "AvgPool"):
        window = integers_attribute(node, "ksize")
        plain_padding = text_attribute(node, "padding") in ("SAME", "VALID")
        too_wide = node.op == "AvgPool" and int(np.prod(window)) > _LARGEST_AVERAGE
        if window[0] != 1 or window[3] != 1 or not plain_padding or too_wide:
            return ()
    return tuple(moved)


def _has_rank(model: TensorFlowModel, name: str) -> bool:
    return model.shapes[name][0] is not None


def layer_of(found: Anatomy) -> dict[str, str]:
    """Node that a layer's kernel can run along → that layer."""
    return {member: head for head, cluster in found.clusters.items() for member in cluster.members}


def build_graph(model: TensorFlowModel) -> OpGraph:
    """Every op that computes something."""
    found = anatomy(model)
    cluster_of = layer_of(found)
    fed = [port.tensor for port in model.signature.inputs]
    nodes = [
        node
        for name, node in model.graph.nodes.items()
        if node.op not in (CONSTANT, "NoOp") and name not in map(node_of, fed)
    ]
    known = {node.name for node in nodes} | set(map(node_of, fed))
    ops = []
    for node in nodes:
        read = [node_of(tensor) for tensor in data_inputs(node)]
        ops.append(
            Op(
                node.name,
                node.op,
                tuple(source for source in read if source in known),
                cluster=cluster_of.get(node.name),
                carries_int8=node.name in found.carriers,
                writes_int8=node.op in CONVOLUTIONS,
            )
        )
    outputs = [name for name in model.output_nodes if name in known]
    return OpGraph(ops, [node_of(tensor) for tensor in fed], outputs)
