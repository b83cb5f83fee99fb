"""Inputs whose shape or value the graph leaves open: unknown ranks, and defaults.

A batch may leave out an input with a default (`tf.compat.v1.placeholder_with_default`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from neural_mp.adaptors.common.signatures.signature import Shape, TensorSpec
from neural_mp.adaptors.tensorflow.graph.constants import is_pure
from neural_mp.adaptors.tensorflow.graph.ops import PLACEHOLDERS, Role, op_type, role_of
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, runnable
from neural_mp.adaptors.tensorflow.graph.shape_rules import of_first
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    Array,
    NodeDef,
    TensorGraph,
    channels_first,
    constant_shape,
    data_inputs,
    make_node,
    node_of,
    without_large,
)
from neural_mp.adaptors.tensorflow.model import ServedSignature
from neural_mp.errors import ConversionError, DataError


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
    weight = _resolve_constant(graph, data_inputs(node)[1])
    if weight is None:
        return None
    sizes = constant_shape(weight)
    if role_of(node) is Role.MATRIX_PRODUCT:
        columns = sizes[1 if node.attr["transpose_b"].b else 0]
        return (columns, None) if node.attr["transpose_a"].b else (None, columns)
    open_axes: list[int | None] = [None] * len(sizes)
    open_axes[1 if channels_first(node) else -1] = sizes[-2]
    return tuple(open_axes)


def _resolve_constant(graph: TensorGraph, tensor: str) -> NodeDef | None:
    node = graph.nodes.get(node_of(tensor))
    while node is not None and role_of(node) is Role.IDENTITY:
        node = graph.nodes.get(node_of(node.input[0]))
    return node if node is not None and node.op == CONSTANT else None


#: Larger defaults, e.g. whole images, would fill the description of a saved model.
_MAX_DEFAULT_ELEMENTS = 4096


def with_defaults(
    graph: TensorGraph, signature: ServedSignature, named: Collection[str]
) -> tuple[ServedSignature, list[str]]:
    """Return the signature with the defaults of its inputs, and warnings.

    An input whose default is computed in a run is left out, unless its name is in `named`, the
    inputs that the options or the data name. Defaults of the signature are added to the graph.
    """
    inputs, left_out = list[TensorSpec](), list[str]()
    for port in signature.inputs:
        node = graph[port.tensor]
        if port.default is not None and role_of(node) is Role.PLACEHOLDER:
            _set_placeholder_default(graph, node, port.default)
        elif role_of(node) is Role.OPTIONAL_PLACEHOLDER and port.default is None:
            value = _compute_default(graph, node)
            if value is None and not any(map(port.answers_to, named)):
                left_out.append(port.name)
                continue
            port = replace(port, default=value)
        inputs.append(port)
    if not inputs:
        return signature, []
    warnings = [
        f"the input {name!r} is left out, because the graph computes its default; to keep the "
        f"input, name all inputs with inputs="
        for name in left_out
    ]
    return replace(signature, inputs=tuple(inputs)), warnings


def bind_defaults(graph: TensorGraph, fed: Collection[str]) -> None:
    """Replace inputs with defaults that are no inputs of the signature by their defaults."""
    for name, node in list(graph.nodes.items()):
        if role_of(node) is Role.OPTIONAL_PLACEHOLDER and name not in fed:
            dtype = tf.as_dtype(node.attr["dtype"].type)
            graph.add(make_node("Identity", name, node.input, T=dtype))


def _set_placeholder_default(graph: TensorGraph, node: NodeDef, value: Array) -> None:
    constant = graph.put_constant(f"{node.name}/default", value)
    attributes = {key: node.attr[key] for key in ("dtype", "shape") if key in node.attr}
    graph.add(make_node("PlaceholderWithDefault", node.name, [constant], **attributes))


def _compute_default(graph: TensorGraph, node: NodeDef) -> Array | None:
    """Return a default of numbers that are the same in every run; None for any other."""
    part = graph.pruned([node.input[0]])
    if not all(inner.op == CONSTANT or _is_computable(inner) for inner in part.nodes.values()):
        return None
    try:
        (value,) = Runner(runnable(part.to_graph_def()))({}, [node.input[0]])
    except (ConversionError, ValueError):
        return None
    value = np.asarray(value)
    return value if value.dtype.kind in "biuf" and value.size <= _MAX_DEFAULT_ELEMENTS else None


def _is_computable(node: NodeDef) -> bool:
    return node.op not in PLACEHOLDERS and is_pure(node)


def declared_defaults(saved: saved_model_pb2.SavedModel, key: str) -> Mapping[str, Array]:
    """Return input → default that a signature of a SavedModel declares."""
    definitions = (
        meta.signature_def[key] for meta in saved.meta_graphs if key in meta.signature_def
    )
    values = {
        name: tf.make_ndarray(proto)
        for definition in definitions
        for name, proto in definition.defaults.items()
    }
    return {name: value for name, value in values.items() if value.dtype.kind in "biuf"}


def feeds_defaults(saved: saved_model_pb2.SavedModel) -> bool:
    """Whether an input of a signature is a placeholder with a default."""
    return any(
        role_of(node) is Role.OPTIONAL_PLACEHOLDER and node.name in fed
        for meta in saved.meta_graphs
        if (fed := _fed_nodes(meta.signature_def))
        for node in meta.graph_def.node
    )


def _fed_nodes(definitions: Mapping[str, meta_graph_pb2.SignatureDef]) -> set[str]:
    return {
        node_of(info.name)
        for definition in definitions.values()
        for info in definition.inputs.values()
    }
