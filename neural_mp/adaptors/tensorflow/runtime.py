"""Running graphs: sessions, shapes, and the runtime's own offline passes."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import config_pb2
from tensorflow.python.grappler import tf_optimizer

from neural_mp.adaptors.tensorflow.nodes import GraphDef, indexed, node_of

logger = logging.getLogger(__name__)


#: The passes the runtime does by default, less those that take a graph to MLIR and back: they gain
#: nothing on a frozen graph, and take a second and several copies of it.
_FUSING = (
    *("function", "pruning", "constfold", "arithmetic", "layout", "remap", "loop", "dependency"),
)


class Runner:
    """A graph in a session, compiled once for every set of tensors that is fetched.

    Args:
        graph: the graph.
        optimized: whether the runtime may fuse its ops first, for which it copies the graph
            several times.
    """

    def __init__(self, graph: tf.Graph, *, optimized: bool = True) -> None:
        config = tf.compat.v1.ConfigProto()
        rewrites = config.graph_options.rewrite_options
        rewrites.disable_meta_optimizer = not optimized
        rewrites.optimizers.extend(_FUSING)
        self._session = tf.compat.v1.Session(graph=graph, config=config)
        self._callables: dict[tuple[tuple[str, ...], tuple[str, ...]], Any] = {}

    def __call__(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Any]:
        """Run.

        Args:
            feeds: tensor name → array.
            fetches: tensor names.
        """
        computed = [name for name in fetches if name not in feeds]
        key = (tuple(feeds), tuple(computed))
        if computed and key not in self._callables:
            options = config_pb2.CallableOptions(
                feed=[indexed(name) for name in feeds], fetch=[indexed(name) for name in computed]
            )
            self._callables[key] = self._session._make_callable_from_options(options)
        found = self._callables[key](*feeds.values()) if computed else []
        results = dict(zip(computed, found, strict=True))
        return [feeds[name] if name in feeds else results[name] for name in fetches]

    def traced(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> Any:
        """The runtime's `StepStats` of one run."""
        options = config_pb2.RunOptions(trace_level=config_pb2.RunOptions.FULL_TRACE)
        metadata = config_pb2.RunMetadata()
        named = {indexed(name): value for name, value in feeds.items()}
        self._session.run([indexed(f) for f in fetches], named, options, metadata)
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


def offline_passes(
    graph: GraphDef, passes: Iterable[str], inputs: Iterable[str], outputs: Iterable[str]
) -> GraphDef:
    """Let passes of the runtime's graph optimiser rewrite a graph without running it.

    Args:
        graph: the graph.
        passes: their names, such as `constfold`.
        inputs: tensors fed, whose nodes must stay.
        outputs: tensors fetched, whose nodes must stay.

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
