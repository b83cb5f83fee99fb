"""Lookup tables turned into constants, and look-ups into ops that compute.

A frozen graph keeps no tables. Integers are found by binary search in the sorted keys, strings in
the bucket of their hash, where each key is compared as a whole: results equal those of the table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.tensor_graph import (
    Array,
    NodeDef,
    TensorGraph,
    copied,
    data_inputs,
    is_control,
    make_constant,
    node_of,
)

FIND, SIZE = "LookupTableFindV2", "LookupTableSizeV2"
#: Buckets per key; a bucket then holds a handful of keys at most.
_BUCKETS_PER_KEY = 2


def freeze_tables(
    graph: TensorGraph, handles: Mapping[str, str], captured: Mapping[str, Any]
) -> bool:
    """Put ops that compute in the place of the look-ups in captured tables.

    Args:
        graph: graph, changed in place.
        handles: node that hands on a captured tensor → the node of that tensor.
        captured: node of a captured tensor → the tensor.

    Returns:
        Whether there were any.
    """
    contents: dict[tuple[str, Any, Any], tuple[Array, Array]] = {}
    found = False
    for node in list(graph.nodes.values()):
        handle = handles.get(node_of(node.input[0])) if node.op in (FIND, SIZE) else None
        if handle is None:
            continue
        table, found = captured[handle], True
        if node.op == SIZE:
            size = tf.raw_ops.LookupTableSizeV2(table_handle=table).numpy()
            graph.add(make_constant(node.name, size))
            continue
        kinds = (tf.as_dtype(node.attr["Tin"].type), tf.as_dtype(node.attr["Tout"].type))
        key = (handle, *kinds)
        if key not in contents:
            exported = tf.raw_ops.LookupTableExportV2(
                table_handle=table, Tkeys=kinds[0], Tvalues=kinds[1]
            )
            contents[key] = (exported[0].numpy(), exported[1].numpy())
        _replace(graph, node, *kinds, *contents[key])
    return found


def _replace(
    graph: TensorGraph, node: NodeDef, kind: tf.DType, given: tf.DType, keys: Array, values: Array
) -> None:
    """Put the ops of a look-up in the place of its node, the last under the same name."""
    buckets = _buckets(keys) if kind is tf.string and keys.size else None
    with tf.Graph().as_default() as part:
        asked = tf.compat.v1.placeholder(kind, name="asked")
        default = tf.compat.v1.placeholder(given, [], name="default")
        flat = tf.reshape(asked, [-1])
        if not keys.size:
            results = tf.fill(tf.shape(flat), default)
        elif buckets is None:
            results = _of_integers(flat, default, keys, values)
        else:
            results = _of_strings(flat, default, keys, values, buckets)
        tf.identity(tf.reshape(results, tf.shape(asked)), name="result")
    _, asked_of, default_of = data_inputs(node)
    names = {"asked": asked_of, "default": default_of, "result": node.name}
    for inner in part.as_graph_def().node:
        names.setdefault(inner.name, graph.unused(f"{node.name}/{inner.name}"))
    for inner in part.as_graph_def().node:
        if inner.op == "Placeholder":
            continue
        written = copied(inner, names[inner.name])
        for position, tensor in enumerate(inner.input):
            source, colon, index = tensor.partition(":")
            written.input[position] = f"{names[source]}{colon}{index}"
        if inner.name == "result":
            written.input.extend(filter(is_control, node.input))
        graph.add(written)


def _of_integers(asked: tf.Tensor, default: tf.Tensor, keys: Array, values: Array) -> tf.Tensor:
    """Return the values of integers, the default for those that are no keys."""
    order = np.argsort(keys)
    keys, values = keys[order], values[order]
    places = tf.minimum(tf.searchsorted(keys, asked), len(keys) - 1)
    known = tf.equal(tf.gather(keys, places), asked)
    return tf.where(known, tf.gather(values, places), default)


def _buckets(keys: Array) -> Array:
    """Return the places of the keys in each bucket; beyond them, a place behind the last key."""
    count = _BUCKETS_PER_KEY * len(keys)
    hashed = tf.strings.to_hash_bucket_fast(keys, count).numpy()
    loads = np.bincount(hashed, minlength=count)
    found = np.full((count, loads.max()), len(keys), np.int32)
    order = np.argsort(hashed, kind="stable")
    starts = np.cumsum(loads) - loads
    found[hashed[order], np.arange(len(keys)) - starts[hashed[order]]] = order
    return found


def _of_strings(
    asked: tf.Tensor, default: tf.Tensor, keys: Array, values: Array, buckets: Array
) -> tf.Tensor:
    """Return the values of strings, the default for those that are no keys."""
    places = tf.gather(buckets, tf.strings.to_hash_bucket_fast(asked, len(buckets)))
    same = tf.equal(tf.gather(np.append(keys, b""), places), asked[:, tf.newaxis])
    same &= places < len(keys)
    place = tf.reduce_sum(tf.where(same, places, 0), -1)
    return tf.where(tf.reduce_any(same, -1), tf.gather(values, place), default)
