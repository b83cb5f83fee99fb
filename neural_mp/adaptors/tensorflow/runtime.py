"""Running graphs: sessions, shapes, and the runtime's own offline passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer

from neural_mp.adaptors.tensorflow.nodes import (
    CONSTANT,
    GraphDef,
    TensorGraph,
    make_node,
    node_of,
)

logger = logging.getLogger(__name__)

#: Sizes of a tensor, None for those not known before it runs; None where not even the rank is.
Shape = tuple[int | None, ...] | None
#: Constants larger than this play no part in inferring shapes.
_LARGE = 256


class Runner:
    """A graph in a session, compiled once for every set of tensors that is fetched."""

    def __init__(self, graph: tf.Graph) -> None:
        self._session = tf.compat.v1.Session(graph=graph)
        self._callables: dict[tuple[tuple[str, ...], tuple[str, ...]], Any] = {}

    def __call__(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Any]:
        """Run.

        Args:
            feeds: tensor name → array.
            fetches: tensor names.
        """
        computed = [name for name in fetches if name not in feeds]
        key = (tuple(feeds), tuple(computed))
        if key not in self._callables:
            options = config_pb2.CallableOptions(
                feed=[_full(name) for name in feeds], fetch=[_full(name) for name in computed]
            )
            self._callables[key] = self._session._make_callable_from_options(options)
        found = self._callables[key](*feeds.values()) if computed else []
        results = dict(zip(computed, found, strict=True))
        return [feeds[name] if name in feeds else results[name] for name in fetches]

    def traced(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> Any:
        """The runtime's `StepStats` of one run."""
        options = config_pb2.RunOptions(trace_level=config_pb2.RunOptions.FULL_TRACE)
        metadata = config_pb2.RunMetadata()
        named = {_full(name): value for name, value in feeds.items()}
        self._session.run([_full(f) for f in fetches], named, options, metadata)
        return metadata.step_stats

    def __del__(self) -> None:
        session = getattr(self, "_session", None)
        if session is not None:
            self._callables.clear()
            session.close()


def imported(graph: GraphDef) -> tf.Graph:
    """A graph as TensorFlow takes it in, which checks it and infers shapes."""
    found = tf.Graph()
    with found.as_default():
        tf.graph_util.import_graph_def(graph, name="")
    return found


def _full(tensor: str) -> str:
    return tensor if ":" in tensor else f"{tensor}:0"


def shapes(graph: TensorGraph) -> dict[str, list[Shape]]:
    """Node → the shapes of its results, as far as the runtime infers them."""
    return {
        operation.name: [_shape(tensor) for tensor in operation.outputs]
        for operation in imported(_without_large_constants(graph)).get_operations()
    }


def _shape(tensor: tf.Tensor) -> Shape:
    return None if tensor.shape.rank is None else tuple(tensor.shape.as_list())


def _without_large_constants(graph: TensorGraph) -> GraphDef:
    small = GraphDef(versions=graph.versions, library=graph.library)
    for node in graph.nodes.values():
        value = node.attr["value"].tensor if node.op == CONSTANT else None
        if value is not None and value.ByteSize() > _LARGE:
            stand_in = make_node("Placeholder", node.name, node.input)
            stand_in.attr["dtype"].type = node.attr["dtype"].type
            stand_in.attr["shape"].shape.CopyFrom(value.tensor_shape)
            small.node.append(stand_in)
        else:
            small.node.append(node)
    return small


def offline_passes(
    graph: GraphDef, passes: Iterable[str], inputs: Iterable[str], outputs: Iterable[str]
) -> GraphDef:
    """Let passes of the runtime's graph optimiser rewrite a graph without running it.

    Args:
        graph: the graph.
        passes: their names, such as `constfold`.
        inputs, outputs: tensors whose nodes must stay.

    Raises:
        tf.errors.OpError: a pass refuses the graph.
    """
    taken = imported(graph)
    with taken.as_default():
        meta = tf.compat.v1.train.export_meta_graph(graph_def=graph, graph=taken)
    kept = dict.fromkeys(node_of(tensor) for tensor in (*outputs, *inputs))
    meta.collection_def["train_op"].node_list.value.extend(kept)
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.optimizers.extend(passes)
    rewrites.meta_optimizer_iterations = 2
    rewrites.min_graph_nodes = -1
    return tf_optimizer.OptimizeGraph(config, meta)
