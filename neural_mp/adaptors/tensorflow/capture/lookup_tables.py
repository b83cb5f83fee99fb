"""Lookup tables of models as constants and ops with equal results."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf
from tensorflow.core.framework import types_pb2
from tensorflow.python.eager import context

from neural_mp.adaptors.tensorflow.graph.ops import Role, get_op_role
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    NodeDef,
    TensorGraph,
    copy_node,
    get_node_name,
    is_control,
    list_data_inputs,
    make_constant,
)
from neural_mp.errors import ModelLoadError

#: Buckets per key; a bucket then holds a handful of keys at most.
_BUCKETS_PER_KEY = 2


@dataclass(frozen=True)
class Export:
    """An op on a table.

    Attributes:
        handle: node of the table's handle.
        op: op that returns the entries, or their number.
        types: element types of keys and values; empty for the number.
    """

    handle: str
    op: str
    types: tuple[tf.DType, ...] = ()

    def export_table(self, handle: tf.Tensor) -> list[tf.Tensor]:
        """Run the op, or add it to the default graph; return its results."""
        types = dict(zip(("Tkeys", "Tvalues"), self.types, strict=False))
        outputs = getattr(tf.raw_ops, self.op)(table_handle=handle, **types)
        return list(outputs) if self.types else [outputs]


#: Function that returns the results of an `Export`.
Run = Callable[[Export], Sequence[Array]]


#: Roles of ops that pass on a resource, as their first input.
_PASS_ON = (Role.ENTER, Role.SWITCH, Role.NEXT_ITERATION, Role.EXIT)


def trace_table_handles(
    graph: TensorGraph, roots: Collection[str], *, loops: bool = False
) -> dict[str, str]:
    """Return node that passes on a tensor → the node of the tensor, one of the roots.

    If `loops`, resources are followed into loops and branches, which never change a resource.
    """
    handles: dict[str, str] = {}
    for name, node in graph.nodes.items():
        source = handles.get(get_node_name(node.input[0])) if node.input else None
        role = get_op_role(node)
        passes = role is Role.IDENTITY
        if loops and "T" in node.attr and node.attr["T"].type == types_pb2.DT_RESOURCE:
            following = graph[node.input[1]] if role is Role.MERGE else node
            passes = passes or role in _PASS_ON or get_op_role(following) is Role.NEXT_ITERATION
        if name in roots:
            handles[name] = name
        elif source is not None and passes:
            handles[name] = source
    return handles


def freeze_tables(graph: TensorGraph, handles: Mapping[str, str], run: Run) -> bool:
    """Replace look-ups in tables by ops, in place; return whether there were any.

    `handles` maps nodes that pass on the handle of a table to the node of the handle.

    Raises:
        ModelLoadError: a table was never filled, or has keys that are vectors.
    """
    contents: dict[Export, tuple[Array, Array]] = {}
    replaced = False
    for node in list(graph.nodes.values()):
        if get_op_role(node) not in (Role.LOOKUP, Role.LOOKUP_SIZE):
            continue
        handle = handles.get(get_node_name(node.input[0]))
        if handle is None:
            continue
        replaced = True
        if get_op_role(node) is Role.LOOKUP_SIZE:
            graph.add_node(
                make_constant(node.name, *_export_entries(node, run, Export(handle, node.op)))
            )
            continue
        types = tf.as_dtype(node.attr["Tin"].type), tf.as_dtype(node.attr["Tout"].type)
        export = Export(handle, node.op.replace("Find", "Export"), types)
        if export not in contents:
            keys, values = _export_entries(node, run, export)
            contents[export] = keys, values
        _replace_lookup(graph, node, types, *contents[export])
    return replaced


def _export_entries(node: NodeDef, run: Run, export: Export) -> Sequence[Array]:
    try:
        results = run(export)
    except (tf.errors.AbortedError, tf.errors.FailedPreconditionError) as error:
        raise ModelLoadError(
            f"a lookup table must have entries, but the table that {node.name!r} reads was never "
            f"filled, so that the model itself cannot run; .h5 files of Keras do not keep a "
            f"vocabulary from adapt(): save the model as .keras"
        ) from error
    keys = results[0]
    if keys.ndim == 2 and keys.shape[1] == 1:  # a dense table returns a matrix for single values
        return [array[:, 0] if array.shape[1] == 1 else array for array in results]
    if keys.ndim > 1:
        raise ModelLoadError(
            f"keys of a lookup table must be single values, but the table that {node.name!r} reads "
            f"has keys of shape {list(keys.shape[1:])}; export the model without this table"
        )
    return results


def _replace_lookup(
    graph: TensorGraph, node: NodeDef, types: tuple[tf.DType, tf.DType], keys: Array, values: Array
) -> None:
    """Replace the node of a look-up by ops, the last with the node's name."""
    with tf.Graph().as_default() as part:
        query = tf.compat.v1.placeholder(types[0], name="query")
        default = tf.compat.v1.placeholder(types[1], values.shape[1:], name="default")
        flat = tf.reshape(query, [-1])
        if not keys.size:
            row = tf.expand_dims(default, 0)
            results = tf.repeat(row, tf.size(flat), 0)
        elif types[0] is tf.string:
            results = _look_up_strings(flat, default, keys, values)
        else:
            results = _look_up_numbers(flat, default, keys, values)
        shape = tf.concat([tf.shape(query), values.shape[1:]], 0)
        tf.identity(tf.reshape(results, shape), name="result")
    _, query_of, default_of = list_data_inputs(node)
    names = {"query": query_of, "default": default_of, "result": node.name}
    for inner in part.as_graph_def().node:
        names.setdefault(inner.name, graph.unused_name(f"{node.name}/{inner.name}"))
    for inner in part.as_graph_def().node:
        if get_op_role(inner) is Role.PLACEHOLDER:
            continue
        written = copy_node(inner, names[inner.name])
        for position, tensor in enumerate(inner.input):
            source, colon, index = tensor.partition(":")
            written.input[position] = f"{names[source]}{colon}{index}"
        if inner.name == "result":
            written.input.extend(filter(is_control, node.input))
        graph.add_node(written)


def _look_up_numbers(query: tf.Tensor, default: tf.Tensor, keys: Array, values: Array) -> tf.Tensor:
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    indices = tf.minimum(tf.searchsorted(keys, query), len(keys) - 1)
    hits = tf.equal(tf.gather(keys, indices), query)
    return _values_or_default(hits, values, indices, default)


def _values_or_default(
    known: tf.Tensor, values: Array, indices: tf.Tensor, default: tf.Tensor
) -> tf.Tensor:
    while known.shape.rank < values.ndim:
        known = known[..., tf.newaxis]
    return tf.where(known, tf.gather(values, indices), default)


def _arrange_bucket_keys(keys: Array) -> Array:
    """Return the positions of the keys in each bucket, padded with the number of keys."""
    count = _BUCKETS_PER_KEY * len(keys)
    with context.eager_mode():  # also within a graph of TensorFlow 1
        hashed = tf.strings.to_hash_bucket_fast(keys, count).numpy()
    loads = np.bincount(hashed, minlength=count)
    buckets = np.full((count, loads.max()), len(keys), np.int32)
    order = np.argsort(hashed, kind="stable")
    starts = np.cumsum(loads) - loads
    buckets[hashed[order], np.arange(len(keys)) - starts[hashed[order]]] = order
    return buckets


def _look_up_strings(query: tf.Tensor, default: tf.Tensor, keys: Array, values: Array) -> tf.Tensor:
    buckets = _arrange_bucket_keys(keys)
    candidates = tf.gather(buckets, tf.strings.to_hash_bucket_fast(query, len(buckets)))
    same = tf.equal(tf.gather(np.append(keys, b""), candidates), query[:, tf.newaxis])
    same &= candidates < len(keys)
    index = tf.reduce_sum(tf.where(same, candidates, 0), -1)
    return _values_or_default(tf.reduce_any(same, -1), values, index, default)
