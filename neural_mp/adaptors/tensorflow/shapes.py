"""The shapes of a graph's tensors, as far as they are the same for inputs of any size."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import cycle

import tensorflow as tf

from neural_mp.adaptors.tensorflow.constants import stand_in
from neural_mp.adaptors.tensorflow.nodes import (
    PLACEHOLDERS,
    GraphDef,
    NodeDef,
    TensorGraph,
    constant_bytes,
)
from neural_mp.adaptors.tensorflow.runtime import imported

logger = logging.getLogger(__name__)

#: Sizes of a tensor, None for those not known before it runs; None where not even the rank is.
Shape = tuple[int | None, ...] | None
#: Constants with more bytes play no part in inferring shapes.
_LARGE = 256
#: Two sizes to take for every unknown one in turn; primes, so that no two products are alike.
_SIZES = ((97, 89), (101, 103), (107, 109), (113, 127), (131, 137), (139, 149))


def shapes(graph: TensorGraph) -> dict[str, list[Shape]]:
    """Node → the shapes of its results.

    The runtime infers little of what is computed from unknown sizes (the `Prod` of a `Shape`), but
    all of it once the sizes are given. So unknown sizes of the inputs are given values, twice;
    what comes out the same both times does not depend on them.
    """
    plain = _inferred(graph, None)
    if not any(_unknown(node) for node in graph.nodes.values()):
        return plain
    try:
        first, second = _inferred(graph, 0), _inferred(graph, 1)
    except (ValueError, tf.errors.OpError):
        logger.debug("the graph does not take every size", exc_info=True)
        return plain
    return {
        name: [_common(*both) for both in zip(first[name], second[name], strict=True)]
        for name in plain
    }


def _common(one: Shape, other: Shape) -> Shape:
    if one is None or other is None or len(one) != len(other):
        return None
    return tuple(a if a == b else None for a, b in zip(one, other, strict=True))


def _unknown(node: NodeDef) -> bool:
    if node.op not in PLACEHOLDERS or "shape" not in node.attr:
        return False
    proto = node.attr["shape"].shape
    return not proto.unknown_rank and any(dimension.size < 0 for dimension in proto.dim)


def _inferred(graph: TensorGraph, turn: int | None) -> dict[str, list[Shape]]:
    small = GraphDef(versions=graph.versions, library=graph.library)
    sizes = cycle(_SIZES[1:])
    for node in graph.nodes.values():
        if constant_bytes(node) > _LARGE:
            small.node.append(stand_in(node))
        elif turn is not None and _unknown(node):
            small.node.append(_sized(node, sizes, turn))
        else:
            small.node.append(node)
    return {
        operation.name: [_shape(tensor) for tensor in operation.outputs]
        for operation in imported(small).get_operations()
    }


def _sized(node: NodeDef, sizes: Iterator[tuple[int, int]], turn: int) -> NodeDef:
    copied = NodeDef()
    copied.CopyFrom(node)
    for axis, dimension in enumerate(copied.attr["shape"].shape.dim):
        if dimension.size < 0:
            # The first axis is the batch, which all inputs have in common.
            dimension.size = (_SIZES[0] if axis == 0 else next(sizes))[turn]
    return copied


def _shape(tensor: tf.Tensor) -> Shape:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
