"""What a graph is made of, as far as INT8 is concerned."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.tensorflow.fusion import FusionGroup, find_fusion_groups, non_negative
from neural_mp.adaptors.tensorflow.nodes import (
    NodeDef,
    TensorGraph,
    data_inputs,
    integers_attribute,
    text_attribute,
)
from neural_mp.adaptors.tensorflow.shapes import Shapes

#: Ops that move or select values, and how many tensors they do it with; the rest of their inputs
#: says how, and must be constant. None: all inputs but the last.
AGNOSTIC: Mapping[str, int | None] = {
    **dict.fromkeys(("Reshape", "Squeeze", "ExpandDims", "Transpose", "Slice", "StridedSlice"), 1),
    **dict.fromkeys(("MaxPool", "AvgPool", "Pad", "SpaceToDepth", "DepthToSpace"), 1),
    **dict.fromkeys(("SpaceToBatchND", "BatchToSpaceND", "ResizeNearestNeighbor"), 1),
    "ConcatV2": None,
}
#: Averages over larger windows are too fine for the steps of what they average.
_LARGEST_AVERAGE = 9


@dataclass(frozen=True)
class GraphStructure:
    """What a graph is made of, as far as INT8 is concerned.

    Attributes:
        fusion_groups: layer → what its kernel can run along.
        agnostic_ops: ops that pass INT8 on → the tensors they move.
        non_negative: nodes whose results are never negative.
    """

    fusion_groups: Mapping[str, FusionGroup]
    agnostic_ops: Mapping[str, tuple[str, ...]]
    non_negative: frozenset[str]

    def layer_of(self) -> dict[str, str]:
        """Node that a layer's kernel can run along → that layer."""
        return {
            member: head
            for head, fusion_group in self.fusion_groups.items()
            for member in fusion_group.members
        }


def structure(graph: TensorGraph, outputs: frozenset[str], shapes: Shapes) -> GraphStructure:
    """Take a graph apart; `outputs` are the nodes whose results leave it."""
    agnostic_ops = {
        name: moved
        for name, node in graph.nodes.items()
        if (moved := _moved(graph, node)) and shapes[name][0] is not None
    }
    return GraphStructure(
        find_fusion_groups(graph, outputs, shapes), agnostic_ops, non_negative(graph)
    )


def _moved(graph: TensorGraph, node: NodeDef) -> tuple[str, ...]:
    """The tensors that an op moves without changing them; none where it does more."""
    if node.op not in AGNOSTIC or "T" not in node.attr:
        return ()
    tensors = data_inputs(node)
    count = AGNOSTIC[node.op]
    moved = tensors[:-1] if count is None else tensors[:count]
    if any(":" in tensor or graph.is_constant(tensor) for tensor in moved):
        return ()
    if not all(graph.is_constant(tensor) for tensor in tensors[len(moved) :]):
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
