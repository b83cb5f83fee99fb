"""The shapes of a graph's tensors, as far as the runtime infers them."""

from __future__ import annotations

import tensorflow as tf

from neural_mp.adaptors.tensorflow.constants import stand_in
from neural_mp.adaptors.tensorflow.nodes import GraphDef, TensorGraph, constant_bytes
from neural_mp.adaptors.tensorflow.runtime import imported

#: Sizes of a tensor, None for those not known before it runs; None where not even the rank is.
Shape = tuple[int | None, ...] | None
#: Constants with more bytes play no part in inferring shapes.
_LARGE = 256


def shapes(graph: TensorGraph) -> dict[str, list[Shape]]:
    """Node → the shapes of its results."""
    small = GraphDef(versions=graph.versions, library=graph.library)
    small.node.extend(
        stand_in(node) if constant_bytes(node) > _LARGE else node for node in graph.nodes.values()
    )
    return {
        operation.name: [_shape(tensor) for tensor in operation.outputs]
        for operation in imported(small).get_operations()
    }


def _shape(tensor: tf.Tensor) -> Shape:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())
