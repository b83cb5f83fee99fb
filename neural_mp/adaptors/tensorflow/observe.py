"""Observation of tensors in runs; statistics are computed within the graph by the runtime."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.calibration import (
    SAMPLES_PER_BATCH,
    BatchStats,
    in_source_range,
    sample_fractions,
)
from neural_mp.adaptors.common.op_outputs import (
    OpOutput,
    OutputLocation,
    build_results_graph,
    read_op_value,
)
from neural_mp.adaptors.common.signatures.input_spec import in_parts
from neural_mp.adaptors.tensorflow.graph.control_flow import find_frames, in_bodies, map_frame_loops
from neural_mp.adaptors.tensorflow.graph.runtime import Runner
from neural_mp.adaptors.tensorflow.graph.shape_inference import with_sizes
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    Array,
    TensorGraph,
    get_node_name,
    get_output_index,
)
from neural_mp.adaptors.tensorflow.kernels.convert import protect_summands
from neural_mp.adaptors.tensorflow.model import TensorFlowModel, build_graph
from neural_mp.core.graph import OpGraph


def select_float_results(
    imported: tf.Graph, graph: TensorGraph, tensors: Iterable[str]
) -> dict[str, tf.Tensor]:
    """Return the named tensors of an imported graph that are floating-point and can be fetched.

    Left out are results of other types (integers, strings, lists of tensors, resources), ops
    without results (assertions), and tensors in loops, which the runtime cannot fetch and which
    differ in every iteration.
    """
    within = find_frames(graph)  # without the exits of outermost loops
    return _select_float_tensors(
        imported, (name for name in tensors if get_node_name(name) not in within)
    )


def _select_float_tensors(imported: tf.Graph, tensors: Iterable[str]) -> dict[str, tf.Tensor]:
    floats = {}
    for name in tensors:
        results = imported.get_operation_by_name(get_node_name(name)).outputs
        if (
            len(results) > get_output_index(name)
            and results[get_output_index(name)].dtype.is_floating
        ):
            floats[name] = results[get_output_index(name)]
    return floats


class LoopRecords:
    """Lists in the loops of an imported graph that collect records of iterations."""

    def __init__(self, imported: tf.Graph, graph: TensorGraph) -> None:
        self._imported = imported
        self._frames = find_frames(graph)
        self._loops = map_frame_loops(graph, self._frames)

    def collect_record(self, tensor: str, record: tf.Tensor) -> tf.Tensor:
        """Return the concatenated records of all iterations, outside of all loops.

        The record of a tensor is a vector of float32 that is computed in the same loop.
        """
        ops = tf.raw_ops
        nest = self._list_enclosing_loops(self.loop_of(tensor))
        handle = ops.EmptyTensorList(
            element_shape=tf.constant(-1),
            max_num_elements=tf.constant(-1),
            element_dtype=tf.float32,
        )
        variables = []
        for loop in nest:
            entered = ops.Enter(
                data=handle, frame_name=loop, parallel_iterations=self._loops[loop].parallel or 10
            )
            merged = ops.Merge(inputs=[entered, entered]).output
            condition = self._imported.get_tensor_by_name(f"{self._loops[loop].condition}:0")
            final, stays = ops.Switch(data=merged, pred=condition)
            variables.append((merged, final))
            handle = ops.Identity(input=stays)
        handle = ops.TensorListPushBack(input_handle=handle, tensor=record)
        for merged, final in reversed(variables):
            merged.op._update_input(1, ops.NextIteration(data=handle))
            handle = ops.Exit(data=final)
        return ops.TensorListConcatV2(
            input_handle=handle,
            element_shape=tf.constant([-1]),
            leading_dims=tf.constant([], tf.int64),
            element_dtype=tf.float32,
        ).tensor

    def loop_of(self, tensor: str) -> str:
        """Return the loop in which a tensor is computed."""
        return self._frames[get_node_name(tensor)]

    def _list_enclosing_loops(self, loop: str) -> list[str]:
        """Return a loop and its enclosing loops, the outermost first."""
        nest = []
        while loop:
            nest.append(loop)
            loop = self._loops[loop].around
        return nest[::-1]


#: Bytes of input per run; the memory for intermediate results grows with the input.
_INPUT_BYTES = 8 << 20


def watch_statistics(
    model: TensorFlowModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, BatchStats]]:
    """Run batches and yield statistics of the named tensors that are floating-point.

    A tensor in a loop yields statistics for every iteration.
    """
    graph, weights = model.without_weights()
    with graph.as_default():
        positions = tf.constant(sample_fractions())
        numbers = select_float_results(graph, model.graph, sorted(tensors))
        reduced = {name: _reduce_tensor(tensor, positions) for name, tensor in numbers.items()}
        recorded = _record_by_loop(graph, model.graph, sorted(tensors), _record_statistics)
    fetches = [tensor.name for results in reduced.values() for tensor in results]
    fetches += [tensor.name for tensor in recorded.values()]
    runner = Runner(graph, weights)
    for feeds in map(model.signature.bind_inputs, batches):
        for part in _split_batch(model, feeds):
            outputs = map(np.asarray, runner(part, fetches))
            for name, results in reduced.items():
                size, sample, *rest = (next(outputs) for _ in results)
                if not size.size or not size:  # branch not taken, or empty tensor
                    continue
                low, high, power, mean = map(np.atleast_1d, rest)
                count = int(size) // len(power)
                stats = BatchStats(low, high, power, count, sample, mean)
                yield name, in_source_range(stats, model.source_ranges.get(name))
            for names in recorded:
                yield from _iterate_iteration_statistics(names, next(outputs))


def observe_values(
    model: TensorFlowModel, batches: Iterable[Any], tensors: Collection[str]
) -> Iterator[tuple[str, Array]]:
    """Run batches and yield the values of the named tensors that are floating-point.

    Without tensors in loops.
    """
    graph, weights = model.without_weights()
    with graph.as_default():
        numbers = select_float_results(graph, model.graph, sorted(tensors))
    runner = Runner(graph, weights)
    for feeds in map(model.signature.bind_inputs, batches):
        for part in _split_batch(model, feeds):
            # The runtime does not return what it is fed.
            fetched = [tensor.name for name, tensor in numbers.items() if name not in part]
            outputs = iter(runner(part, fetched))
            for name in numbers:
                array = np.asarray(part[name] if name in part else next(outputs), np.float32)
                if array.size:  # empty in a branch not taken
                    yield name, array


def _record_by_loop(
    imported: tf.Graph,
    graph: TensorGraph,
    tensors: Iterable[str],
    record: Callable[[tf.Tensor], tf.Tensor],
) -> dict[tuple[str, ...], tf.Tensor]:
    """Return tensors of the same loop → their records of all iterations, in this order."""
    records, bodies = LoopRecords(imported, graph), in_bodies(graph)
    inside = _select_float_tensors(
        imported, (name for name in tensors if get_node_name(name) in bodies)
    )
    by_loop: dict[str, list[str]] = {}
    for name in inside:
        by_loop.setdefault(records.loop_of(name), []).append(name)
    collected = {}
    for names in by_loop.values():
        parts = []
        for tensor in map(inside.__getitem__, names):
            with tf.control_dependencies([tensor.op]):  # ties the constants to the iteration
                parts.append(record(tensor))
        with tf.control_dependencies([parts[0].op]):
            joined = tf.concat(parts, 0)
        collected[tuple(names)] = records.collect_record(names[0], joined)
    return collected


def _record_statistics(tensor: tf.Tensor) -> tf.Tensor:
    """Return the statistics of one iteration as a vector that starts with its length."""
    size, *rest = _reduce_tensor(tensor, tf.constant(sample_fractions()))
    parts = [tf.raw_ops.Reshape(tensor=part, shape=[-1]) for part in rest]
    counted = tf.raw_ops.Cast(x=[size], DstT=tf.float32)
    record = tf.concat([counted, *parts], 0)
    length = tf.raw_ops.Cast(x=tf.raw_ops.Shape(input=record), DstT=tf.float32)
    return tf.concat([length, record], 0)


def _iterate_iteration_statistics(
    names: Sequence[str], records: Array
) -> Iterator[tuple[str, BatchStats]]:
    """Yield tensor → its statistics, for every iteration in which it is not empty."""
    for name in cycle(names):
        if not records.size:
            return
        length, size = int(records[0]), int(records[1])
        numbers, records = records[2 : length + 1], records[length + 1 :]
        if size:
            sample, rest = numbers[:SAMPLES_PER_BATCH], numbers[SAMPLES_PER_BATCH:]
            low, high, power, mean = rest.reshape(4, -1)
            yield name, BatchStats(low, high, power, size // len(power), sample, mean)


def count_tensor_elements(
    model: TensorFlowModel, inputs: object, tensors: Collection[str]
) -> dict[str, float]:
    """Return tensor → its number of elements in a run; see `Adaptor.element_counts`.

    Only a graph with sizes that depend on values is run.
    """
    feeds = model.signature.bind_inputs(inputs)
    inferred = with_sizes(model.graph, {name: array.shape for name, array in feeds.items()})
    if inferred is not None:
        numbers = select_float_results(inferred, model.graph, sorted(tensors))
        sizes = {name: tensor.shape.num_elements() for name, tensor in numbers.items()}
        if None not in sizes.values():
            return {name: float(size) for name, size in sizes.items() if size}
    return _count_elements(model, feeds, sorted(tensors))


def _count_elements(
    model: TensorFlowModel, feeds: dict[str, Array], tensors: Iterable[str]
) -> dict[str, float]:
    ops = tf.raw_ops
    graph, weights = model.without_weights()
    with graph.as_default():
        numbers = select_float_results(graph, model.graph, tensors)
        sizes = {name: ops.Size(input=x, out_type=tf.int64) for name, x in numbers.items()}
        recorded = _record_by_loop(
            graph,
            model.graph,
            tensors,
            lambda x: ops.Cast(x=[ops.Size(input=x, out_type=tf.int64)], DstT=tf.float32),
        )
    runner = Runner(graph, weights)
    fetches = [tensor.name for tensor in (*sizes.values(), *recorded.values())]
    totals: dict[str, float] = defaultdict(float)
    for part in _split_batch(model, feeds):
        results = map(np.asarray, runner(part, fetches))
        for name in sizes:
            totals[name] += float(next(results).sum())  # empty if in a branch not taken
        for names in recorded:
            counts = next(results).reshape(-1, len(names)).sum(0)
            for name, count in zip(names, counts, strict=True):
                totals[name] += float(count)
    return {name: count for name, count in totals.items() if count}


def _reduce_tensor(tensor: tf.Tensor, positions: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """Return size, samples, minima, maxima, mean squares and means of a tensor.

    The positions of the samples are fractions of the length of the flat tensor.
    """
    # Raw ops: their wrappers cost five times as much time to build.
    ops = tf.raw_ops
    values = tensor if tensor.dtype == tf.float32 else ops.Cast(x=tensor, DstT=tf.float32)
    flat = ops.Reshape(tensor=values, shape=[-1])
    size = ops.Size(input=flat, out_type=tf.int64)
    offsets = ops.Mul(x=positions, y=ops.Cast(x=size, DstT=tf.float64))
    if tensor.shape.rank is None:  # e.g. variables of loops
        last = ops.Sub(x=ops.Rank(input=values), y=1)
        axes = ops.Range(start=0, limit=ops.Maximum(x=last, y=0), delta=1)
    else:
        axes = tf.constant(list(range(max(tensor.shape.rank, 1) - 1)), tf.int32)
    return (
        size,
        ops.Gather(params=flat, indices=ops.Cast(x=offsets, DstT=tf.int64)),
        ops.Min(input=values, axis=axes),
        ops.Max(input=values, axis=axes),
        ops.Mean(input=ops.Square(x=values), axis=axes),
        ops.Mean(input=values, axis=axes),
    )


def _split_batch(model: TensorFlowModel, feeds: dict[str, Array]) -> Iterator[dict[str, Array]]:
    samples, total = model.signature.count_samples(feeds), sum(a.nbytes for a in feeds.values())
    return in_parts(feeds, samples, max(1, samples * _INPUT_BYTES // max(total, 1)))


def first_non_finite(model: TensorFlowModel, inputs: object) -> str | None:
    """Return the first op whose result contains NaN or Inf; None if all are finite."""
    graph, weights = model.without_weights()
    names, checks = [], []
    with graph.as_default():
        nodes = [node.name for node in model.op_nodes]
        for name, tensor in select_float_results(graph, model.graph, nodes).items():
            names.append(model.counted_for.get(name, name))
            checks.append(tf.reduce_all(tf.math.is_finite(tensor)).name)
    feeds = model.signature.bind_inputs(inputs)
    results = Runner(graph, weights)(feeds, checks)
    return next((name for name, fine in zip(names, results, strict=True) if not fine), None)


def build_observable_graph(model: TensorFlowModel) -> OpGraph:
    """Return the ops with observable results; see `OpOutputs`."""
    written = build_graph(model)
    if not model.results:
        return written
    return build_results_graph(written, model.results, {op.name: op.name for op in written})


def make_op_outputs(
    model: TensorFlowModel, ops: Collection[str]
) -> Callable[[Any], dict[str, OpOutput]]:
    """Return a function that runs one batch and returns the results of some ops.

    Ops run as written in the graph, without fusion of float ops by the runtime.
    """
    slots = {op: model.results.get(op, OutputLocation(op, "")) for op in ops}
    fetched = frozenset(get_node_name(slot.tensor) for slot in slots.values())
    # Fetched tensors must not be overwritten by a kernel that adds in place.
    copied = model.graph.copy_graph()
    protect_summands(copied, fetched)
    graph, weights = replace(model, graph=copied).without_weights()
    numbers = select_float_results(graph, copied, {slot.tensor for slot in slots.values()})
    real = {
        op: slot
        for op, slot in slots.items()
        if slot.encoding is not None or slot.tensor in numbers
    }
    fetches = list(dict.fromkeys(slot.tensor for slot in real.values()))
    runner = Runner(graph, weights)

    def compute_outputs(inputs: object) -> dict[str, OpOutput]:
        feeds = model.signature.bind_inputs(inputs)
        tensors = map(np.asarray, runner(feeds, fetches))
        arrays = (array.view(np.uint8) if array.dtype.names else array for array in tensors)
        results = dict(zip(fetches, arrays, strict=True))
        outputs = {
            op: read_op_value(results[slot.tensor], slot.encoding) for op, slot in real.items()
        }
        return {op: value for op, value in outputs.items() if value is not None}

    return compute_outputs
