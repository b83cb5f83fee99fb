"""Inference of shapes for inputs of unknown rank."""

from __future__ import annotations

from dataclasses import replace

import tensorflow as tf

from neural_mp.adaptors.common.signature import Array, Shape
from neural_mp.adaptors.tensorflow.model import ServedSignature
from neural_mp.adaptors.tensorflow.ops import PLACEHOLDERS, Role, op_type, role_of
from neural_mp.adaptors.tensorflow.runtime import runnable
from neural_mp.adaptors.tensorflow.shape_rules import of_first
from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONSTANT,
    NodeDef,
    TensorGraph,
    channels_first,
    constant_shape,
    data_inputs,
    node_of,
    without_large,
)
from neural_mp.errors import DataError


def with_inferred_shapes(graph: TensorGraph, signature: ServedSignature) -> ServedSignature:
    """Return the signature with shapes of inputs of unknown rank, inferred from their readers.

    A convolution determines the rank and channels (as many as its weight has, or a multiple), a
    matrix product the columns.
    """
    if all(port.shape is not None for port in signature.inputs):
        return signature
    readers = graph.consumers()
    inputs = (
        replace(port, shape=_required_shape(graph, readers, port.tensor))
        if port.shape is None
        else port
        for port in signature.inputs
    )
    return replace(signature, inputs=tuple(inputs))


def with_inferred_ranks(signature: ServedSignature, inferred: ServedSignature) -> ServedSignature:
    """Return the signature with only the ranks of the inferred shapes."""
    pairs = zip(signature.inputs, inferred.inputs, strict=True)
    inputs = (
        replace(port, shape=None if guess.shape is None else (None,) * len(guess.shape))
        if port.shape is None
        else port
        for port, guess in pairs
    )
    return replace(signature, inputs=tuple(inputs))


def check_generated(
    graph: TensorGraph, signature: ServedSignature, feeds: dict[str, Array]
) -> None:
    """Check that a graph with inputs of unknown shape accepts generated inputs.

    The check uses shape inference, as running such a graph may end the process.

    Raises:
        DataError: the graph does not accept the inputs.
    """
    unknown = [port for port in signature.inputs if port.shape is None]
    if not unknown:
        return
    sized = graph.copy()
    for tensor, array in feeds.items():
        node = graph.nodes.get(node_of(tensor))
        if node is not None and node.op in PLACEHOLDERS:
            shape = sized.edit(node.name).attr["shape"].shape
            shape.CopyFrom(tf.TensorShape(array.shape).as_proto())
    try:
        runnable(without_large(sized))
    except (ValueError, tf.errors.OpError) as error:
        raise DataError(
            f"the shape of input {unknown[0].name!r} must be known, but neither the graph nor data "
            f"define it; pass data (a dataloader), set inputs to example arrays, or on the command "
            f"line pass --input-shape, e.g. --input-shape 1,224,224,3"
        ) from error


def _required_shape(
    graph: TensorGraph, readers: dict[str, list[tuple[str, int]]], tensor: str
) -> Shape:
    """Return the shape required by the first layer that reads a tensor; None if unknown."""
    for name, position in readers.get(tensor, ()):
        node = graph.nodes[name]
        if position == 0:
            shape = _shape_for(graph, node)
            keeps_shape = op_type(node).shape is of_first
            if shape is None and (keeps_shape or role_of(node) is Role.OPTIONAL_PLACEHOLDER):
                shape = _required_shape(graph, readers, name)
            if shape is not None:
                return shape
    return None


def _shape_for(graph: TensorGraph, node: NodeDef) -> Shape:
    if role_of(node) not in (Role.CONVOLUTION, Role.MATRIX_PRODUCT):
        return None
    weight = _constant(graph, data_inputs(node)[1])
    if weight is None:
        return None
    sizes = constant_shape(weight)
    if role_of(node) is Role.MATRIX_PRODUCT:
        columns = sizes[1 if node.attr["transpose_b"].b else 0]
        return (columns, None) if node.attr["transpose_a"].b else (None, columns)
    open_axes: list[int | None] = [None] * len(sizes)
    open_axes[1 if channels_first(node) else -1] = sizes[-2]
    return tuple(open_axes)


def _constant(graph: TensorGraph, tensor: str) -> NodeDef | None:
    node = graph.nodes.get(node_of(tensor))
    while node is not None and role_of(node) is Role.IDENTITY:
        node = graph.nodes.get(node_of(node.input[0]))
    return node if node is not None and node.op == CONSTANT else None
