"""Execution of graphs: kernels, sessions, shape inference, and the runtime's own offline passes."""

from __future__ import annotations

import atexit
import ctypes
import logging
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import tensorflow as tf
from numpy.typing import NDArray
from tensorflow.core.framework import types_pb2
from tensorflow.core.framework.step_stats_pb2 import StepStats
from tensorflow.core.protobuf import (
    config_pb2,
    device_properties_pb2,
    meta_graph_pb2,
    rewriter_config_pb2,
)
from tensorflow.python.framework import kernels, op_def_registry
from tensorflow.python.grappler import tf_optimizer
from tensorflow.python.grappler.cluster import Cluster

from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    LARGE,
    GraphDef,
    NodeDef,
    TensorGraph,
    copy_node,
    count_constant_bytes,
    get_node_name,
    indexed_name,
    replace_constants,
)
from neural_mp.errors import ConversionError, ModelLoadError, one_line
from neural_mp.util.system.processes import check_process
from neural_mp.util.system.watched_thread import watch_calls

logger = logging.getLogger(__name__)

#: Alignment in bytes at which the runtime uses fed memory without copying.
_ALIGNMENT = 64

#: Size of the constants above which a graph is not compiled for two purposes at once.
_LARGE_GRAPH_BYTES = 64 << 20
#: Processor as the optimizer names it: only ops with a place are fused or change their layout.
CPU = "/job:localhost/replica:0/task:0/device:CPU:0"
#: The runtime's default passes except those that convert a graph to MLIR and back, which bring no
#: speed on a frozen graph, and cost a second and several copies of it.
_FUSING = (
    "function",
    "pruning",
    "constfold",
    "arithmetic",
    "layout",
    "remap",
    "loop",
    "dependency",
)


class Runner:
    """A graph in a session, compiled once for every set of fetched tensors.

    Args:
        graph: a graph.
        held: tensor name → array that is fed in every run. A session copies the constants of its
            graph about four times, but these arrays once.
        is_fused: whether ops were fused before; otherwise, the session fuses them for every set of
            fetched tensors, and copies the constants three times more for that.
        is_large: whether the graph is compiled for one purpose at a time, to save memory: after
            runs with statistics, the next run without them compiles again.
    """

    def __init__(
        self,
        graph: tf.Graph,
        held: Mapping[str, NDArray[Any]] = MappingProxyType({}),
        *,
        is_fused: bool = True,
        is_large: bool = False,
    ) -> None:
        check_process("TensorFlow")
        self._is_large = is_large
        self._held = {name: _copy_aligned(value) for name, value in held.items()}
        self._held_values = tuple(self._held.values())
        config = tf.compat.v1.ConfigProto()
        rewrites = config.graph_options.rewrite_options
        rewrites.disable_meta_optimizer = is_fused
        rewrites.optimizers.extend(_FUSING)
        # A copy of the constants that a session keeps to show what was run.
        config.experimental.disable_output_partition_graphs = True
        self._graph, self._config = graph, config
        self._open_session()

    def _open_session(self) -> None:
        self._session = tf.compat.v1.Session(graph=self._graph, config=self._config)
        self._callables: dict[tuple[tuple[str, ...], tuple[str, ...]], Any] = {}
        # Also runs at exit, before Python deletes the modules that closing needs.
        self._close = weakref.finalize(self, _close_session, self._session, self._callables)

    def end_runs(self) -> None:
        """End the present runs, also loops without end, with their session; open another one."""
        end = self._close
        self._open_session()
        end()

    @watch_calls("the model", lambda local: local["self"].end_runs())
    def __call__(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Any]:
        """Run the graph, given tensor name → array, and return the fetched tensors.

        Raises:
            ConversionError: an op fails.
            ForkError: a parent of this process used TensorFlow before the fork.
        """
        check_process("TensorFlow")
        if not fetches:  # which the runtime rejects
            return []
        try:
            return self._compute_fetches(feeds, fetches)
        except tf.errors.OpError as error:
            raise _run_error(error) from error

    def _compute_fetches(self, feeds: Mapping[str, Any], fetches: Sequence[str]) -> list[Any]:
        key = (tuple(feeds), tuple(fetches))
        call = self._callables.get(key)
        if call is not None:
            return list(call(*feeds.values(), *self._held_values))
        available = {**feeds, **self._held}
        fed = {name: value for name, value in feeds.items() if name not in self._held}
        computed = [name for name in fetches if name not in available]
        if (len(fed), len(computed)) == (len(feeds), len(fetches)):
            self._callables[key] = self._make_callable(available, fetches)
            return self._compute_fetches(feeds, fetches)
        # The runtime rejects tensors that are both fed and fetched.
        outputs = iter(self._compute_fetches(fed, computed) if computed else ())
        return [available[name] if name in available else next(outputs) for name in fetches]

    def trace_runs(
        self, feeds: Mapping[str, Any], fetches: Sequence[str], runs: int
    ) -> Iterator[StepStats]:
        """Yield the runtime's statistics of each of N runs.

        Raises:
            ConversionError: an op fails.
        """
        feeds = {**feeds, **self._held}
        if self._is_large:
            self._callables.clear()
        # A graph compiled for tracing needs as much memory as the other, permanently if the
        # session compiles it automatically.
        run = self._make_callable(feeds, fetches, trace_level=config_pb2.RunOptions.FULL_TRACE)
        for _ in range(runs):
            metadata = config_pb2.RunMetadata()
            try:
                run(*feeds.values(), run_metadata=metadata)
            except tf.errors.OpError as error:
                raise _run_error(error) from error
            yield metadata.step_stats

    def _make_callable(self, feeds: Iterable[str], fetches: Iterable[str], **how: object) -> Any:
        options = config_pb2.CallableOptions(
            feed=[indexed_name(name) for name in feeds],
            fetch=[indexed_name(name) for name in fetches],
            run_options=config_pb2.RunOptions(**how),
        )
        return self._session._make_callable_from_options(options)


def _close_session(session: tf.compat.v1.Session, callables: dict[Any, Any]) -> None:
    callables.clear()
    session.close()


def _run_error(error: tf.errors.OpError) -> ConversionError:
    logger.debug("a run failed", exc_info=True)
    return ConversionError(f"TensorFlow fails to run the graph: {one_line(error)}")


def _copy_aligned(value: NDArray[Any]) -> NDArray[Any]:
    """Return a copy that the runtime uses without copying again."""
    room = np.empty(value.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    aligned = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    aligned[...] = value
    return aligned


class _ReadableGraph(tf.Graph):
    """Graph whose imported ops can be read and extended; cheaper to import than its base class.

    The base class also looks at the inputs of every op for the control flow around the import, of
    which there is none here, and sets the device of colocated ops, which the placer of a session
    does again.
    """

    def _add_new_tf_operations(self, compute_devices: bool = True) -> list[tf.Operation]:
        for operation in self.new_operations():
            self._create_op_from_tf_operation(operation, compute_device=False)
        return []


class _RunnableGraph(tf.Graph):
    """Graph without Python objects for its imported ops, which sessions do not need."""

    def _add_new_tf_operations(self, compute_devices: bool = True) -> list[tf.Operation]:
        return []


def import_graph(graph: GraphDef) -> tf.Graph:
    """Import a graph into TensorFlow, which checks it and infers shapes.

    Raises:
        ModelLoadError: TensorFlow's own code fails.
    """
    return _import_graph(graph, _ReadableGraph())


def import_runnable(graph: GraphDef) -> tf.Graph:
    """Import a graph, and thereby check it, in half the time: its ops can be run but not read.

    Raises:
        ModelLoadError: TensorFlow's own code fails.
    """
    return _import_graph(graph, _RunnableGraph())


def _import_graph(graph: GraphDef, result: tf.Graph) -> tf.Graph:
    try:
        with result.as_default():
            tf.graph_util.import_graph_def(graph, name="")
    except (IndexError, MemoryError, RuntimeError) as error:
        keep_forever(error)
        raise ModelLoadError(f"TensorFlow cannot read the graph: {one_line(error)}") from error
    return result


def keep_forever(error: BaseException) -> None:
    """Keep an exception, and the graphs in its stack, until the process ends and beyond.

    An exception from within TensorFlow's native code leaves a graph locked. Deleting the graph,
    also at the end of the process, would wait for the lock forever.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(error))


@cache
def _describe_cpu_cluster() -> Cluster:
    """Return a processor as a description of where graphs run, which the optimizer requires.

    By default, it would examine this machine for every graph, which takes as long as its passes
    over a small one, and of which a process may do only one at a time.
    """
    cpu = device_properties_pb2.DeviceProperties(type="CPU", num_cores=1)
    cluster = Cluster(devices=[device_properties_pb2.NamedDevice(name=CPU, properties=cpu)])
    atexit.register(cluster.Shutdown)  # Python may delete the module of the function before
    return cluster


def run_offline_passes(
    graph: GraphDef, passes: Iterable[str], inputs: Iterable[str], outputs: Iterable[str]
) -> GraphDef:
    """Return a graph rewritten by passes (e.g. `constfold`) of the runtime, without a run.

    The nodes of the inputs, tensors fed, and of the outputs, tensors fetched, stay.

    Raises:
        tf.errors.OpError: a pass refuses the graph.
    """
    import_runnable(graph)  # the optimizer does not check all that it reads
    meta = meta_graph_pb2.MetaGraphDef(graph_def=graph)
    protected = dict.fromkeys(get_node_name(tensor) for tensor in (*outputs, *inputs))
    meta.collection_def["train_op"].node_list.value.extend(protected)
    config = config_pb2.ConfigProto()
    rewrites = config.graph_options.rewrite_options
    rewrites.optimizers.extend(passes)
    rewrites.meta_optimizer_iterations = 2
    rewrites.min_graph_nodes = -1
    # Only the pass `layout` reads the option.
    rewrites.cpu_layout_conversion = rewriter_config_pb2.RewriterConfig.NCHW_TO_NHWC
    return tf_optimizer.OptimizeGraph(config, meta, verbose=False, cluster=_describe_cpu_cluster())


def optimize_graph(
    graph: TensorGraph,
    passes: Iterable[str],
    inputs: Iterable[str],
    outputs: Iterable[str],
    held: Collection[str] = (),
    device: str = "",
) -> TensorGraph:
    """Return a graph after `run_offline_passes`, which would copy large constants several times.

    `held` are constants that are placeholders in the result; `device` is the device of the ops
    that have none, empty to leave them without.

    Raises:
        tf.errors.OpError: a pass refuses the graph.
    """
    large = {name: node for name, node in graph.nodes.items() if count_constant_bytes(node) > LARGE}
    light = replace_constants(graph, {*large, *held})
    if device:
        for node in light.node:
            node.device = node.device or device
    passed = run_offline_passes(light, passes, (*inputs, *held), outputs)
    result = TensorGraph.from_graph_def(passed)
    for name in large.keys() - set(held):
        if name in result:
            result.nodes[name] = _set_control_inputs(large[name], result[name].input)
    return result


def _set_control_inputs(constant: NodeDef, controls: Sequence[str]) -> NodeDef:
    """Return a constant with the control inputs that passes gave to its placeholder."""
    if list(constant.input) == list(controls):
        return constant
    changed = copy_node(constant)
    changed.input[:] = controls
    return changed


def compile_runner(
    graph: TensorGraph,
    held: Mapping[str, NDArray[Any]],
    inputs: Iterable[str],
    outputs: Iterable[str],
) -> Runner:
    """Return a graph in a session, with ops fused for the outputs: other tensors may not exist.

    `held` are constants that are fed in every run instead, and their values.
    """
    is_large = sum(map(count_constant_bytes, graph.nodes.values())) > _LARGE_GRAPH_BYTES
    try:
        fused = optimize_graph(graph, _FUSING, inputs, outputs, held, CPU)
        return Runner(import_runnable(fused.to_graph_def()), held, is_large=is_large)
    except (tf.errors.OpError, ValueError, ModelLoadError):
        # Convolutions fused in BF16 exist only inside of a session.
        logger.debug("The session has to fuse the ops", exc_info=True)
    whole = import_runnable(replace_constants(graph, held))
    return Runner(whole, held, is_fused=False, is_large=is_large)


#: Device types of kernels: the target device, and kernels for any device.
_DEVICES = ("CPU", "DEFAULT")


@cache
def list_kernel_dtypes(op: str, attribute: str = "T") -> frozenset[tf.DType]:
    """Return the element types of an op's CPU kernels; empty for ops without `attribute`."""
    definition = op_def_registry.get(op)
    attributes = () if definition is None else definition.attr
    declared = next((a for a in attributes if a.name == attribute and a.type == "type"), None)
    if declared is None:
        return frozenset()
    every = frozenset(types_pb2.DataType.values())
    allowed = frozenset(declared.allowed_values.list.type) or every
    types: set[int] = set()
    for kernel in kernels.get_registered_kernels_for_op(op).kernel:
        if kernel.device_type in _DEVICES:
            limits = {c.name: c.allowed_values.list.type for c in kernel.constraint}
            types |= allowed & frozenset(limits.get(attribute, every))
    # Numbers from DT_FLOAT_REF on denote reference types.
    return frozenset(tf.as_dtype(value) for value in types if 0 < value < types_pb2.DT_FLOAT_REF)


@cache
def has_kernel(op: str) -> bool:
    """Whether an op has any kernel on the CPU."""
    registered = kernels.get_registered_kernels_for_op(op).kernel
    return any(kernel.device_type in _DEVICES for kernel in registered)


@cache
def every_op_type() -> frozenset[str]:
    """Return every op type that has a definition or, like fused ops, a kernel."""
    with_kernel = {str(kernel.op) for kernel in kernels.get_all_registered_kernels().kernel}
    return frozenset({*dir(tf.raw_ops), *with_kernel})
