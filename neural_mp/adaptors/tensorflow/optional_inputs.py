"""Inputs with defaults (`tf.compat.v1.placeholder_with_default`), which a batch may leave out."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

import numpy as np
import tensorflow as tf
from tensorflow.core.protobuf import meta_graph_pb2, saved_model_pb2

from neural_mp.adaptors.common.signature import TensorSpec
from neural_mp.adaptors.tensorflow.constant_folding import is_pure
from neural_mp.adaptors.tensorflow.model import ServedSignature
from neural_mp.adaptors.tensorflow.ops import PLACEHOLDERS, Role, role_of
from neural_mp.adaptors.tensorflow.runtime import Runner, runnable
from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONSTANT,
    Array,
    NodeDef,
    TensorGraph,
    make_node,
    node_of,
)
from neural_mp.errors import ConversionError

WITH_DEFAULT = "PlaceholderWithDefault"
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
            _put_default(graph, node, port.default)
        elif role_of(node) is Role.OPTIONAL_PLACEHOLDER and port.default is None:
            value = _constant_default(graph, node)
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


def without_defaults(graph: TensorGraph, fed: Collection[str]) -> TensorGraph:
    """Return the graph with plain placeholders: other runtimes take a default for a constant."""
    plain_inputs = graph.copy()
    for name in fed:
        node = graph.nodes[name]
        if role_of(node) is Role.OPTIONAL_PLACEHOLDER:
            attributes = {key: node.attr[key] for key in ("dtype", "shape") if key in node.attr}
            plain_inputs.add(make_node("Placeholder", name, **attributes))
    return plain_inputs


def _put_default(graph: TensorGraph, node: NodeDef, value: Array) -> None:
    """Replace a placeholder by one with a default."""
    constant = graph.put_constant(f"{node.name}/default", value)
    attributes = {key: node.attr[key] for key in ("dtype", "shape") if key in node.attr}
    graph.add(make_node(WITH_DEFAULT, node.name, [constant], **attributes))


def _constant_default(graph: TensorGraph, node: NodeDef) -> Array | None:
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
