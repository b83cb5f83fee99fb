"""Results of ops that can be fetched as numbers."""

from __future__ import annotations

from collections.abc import Iterable

import tensorflow as tf

from neural_mp.adaptors.tensorflow.control_flow import EXITS, in_bodies, in_loops
from neural_mp.adaptors.tensorflow.tensor_graph import TensorGraph, node_of, output_of


def float_results(
    imported: tf.Graph, graph: TensorGraph, tensors: Iterable[str]
) -> dict[str, tf.Tensor]:
    """Return those of the named tensors that hold floating-point numbers and can be fetched.

    Left out are results of other types (integers, strings, lists of tensors, resources), ops
    without results (assertions), and tensors of loops, which differ in every iteration: the runtime
    fetches nothing from within a loop.

    Args:
        imported: graph as TensorFlow took it in.
        graph: nodes of the same graph.
        tensors: names of tensors.
    """
    within = in_loops(graph)
    outside = (n for n in tensors if node_of(n) not in within or graph[n].op in EXITS)
    return _floats(imported, outside)


def loop_results(
    imported: tf.Graph, graph: TensorGraph, tensors: Iterable[str]
) -> dict[str, tf.Tensor]:
    """Return those of the named tensors that every iteration of a loop's body computes in floats.

    Args:
        imported: graph as TensorFlow took it in.
        graph: nodes of the same graph.
        tensors: names of tensors.
    """
    inside = in_bodies(graph)
    return _floats(imported, (name for name in tensors if node_of(name) in inside))


def _floats(imported: tf.Graph, tensors: Iterable[str]) -> dict[str, tf.Tensor]:
    found = {}
    for name in tensors:
        results = imported.get_operation_by_name(node_of(name)).outputs
        if len(results) > output_of(name) and results[output_of(name)].dtype.is_floating:
            found[name] = results[output_of(name)]
    return found
