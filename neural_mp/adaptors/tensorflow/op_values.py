"""What the ops of a model compute: their results are fetched, in one run."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any

import numpy as np

from neural_mp.adaptors.common.op_outputs import OpResult, OpValue, op_value, results_graph
from neural_mp.adaptors.tensorflow.aliasing import protect_summands
from neural_mp.adaptors.tensorflow.graph import build_graph
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.op_results import float_results
from neural_mp.adaptors.tensorflow.runtime import Runner
from neural_mp.adaptors.tensorflow.tensor_graph import Array, node_of
from neural_mp.core.graph import OpGraph


def results(model: TensorFlowModel) -> OpGraph:
    """The ops whose results a run has; see `Adaptor.results`."""
    written = build_graph(model)
    if not model.results:
        return written
    return results_graph(written, model.results, {op.name: op.name for op in written})


def values(
    model: TensorFlowModel, ops: Collection[str]
) -> Callable[[dict[str, Array]], dict[str, OpValue]]:
    """A function of the inputs (tensor → array) that gives the results of some ops.

    Ops run as they stand in the graph: the runtime does not fuse those of float first.
    """
    places = {op: model.results.get(op, OpResult(op, "")) for op in ops}
    fetched = frozenset(node_of(place.tensor) for place in places.values())
    # What is fetched must not be written over by a kernel that adds in place.
    copied = model.graph.copy()
    protect_summands(copied, fetched)
    graph, weights = replace(model, graph=copied).without_weights()
    numbers = float_results(graph, copied, {place.tensor for place in places.values()})
    real = {
        op: place
        for op, place in places.items()
        if place.encoding is not None or place.tensor in numbers
    }
    fetches = list(dict.fromkeys(place.tensor for place in real.values()))
    runner = Runner(graph, weights, optimized=False)

    def called(feeds: dict[str, Array]) -> dict[str, OpValue]:
        found = dict(zip(fetches, runner(feeds, fetches), strict=True))
        given = {
            op: op_value(_plain(found[place.tensor]), place.encoding) for op, place in real.items()
        }
        return {op: value for op, value in given.items() if value is not None}

    return called


def _plain(found: Any) -> Array:
    """An array whose numbers numpy can compute with."""
    array = np.asarray(found)
    return array.view(np.uint8) if array.dtype.names else array
