"""Kernel traces and op times from the runtime's own step statistics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

import tensorflow as tf
from tensorflow.core.framework.step_stats_pb2 import NodeExecStats, StepStats

from neural_mp.adaptors.tensorflow.graph.tensor_graph import CONSTANT, get_node_name
from neural_mp.adaptors.tensorflow.model import PRECISIONS, TensorFlowModel
from neural_mp.core.op_timings import NOT_REACHED, OpTrace, TracedKernel, build_op_trace
from neural_mp.core.precision import Precision

#: Label of a kernel in the statistics: `name = Type(input, other:1)`.
_LABEL = re.compile(r" = (?P<type>\w+)\((?P<inputs>[^)]*)\)")
_BYTES = (tf.quint8, tf.qint8, tf.uint8, tf.int8)
#: Part of the names of all integer kernels, with or without oneDNN's prefix `_Mkl`.
_INTEGER = "Quantized"


def trace_kernels(model: TensorFlowModel, inputs: object) -> dict[str, OpTrace]:
    """Return op → its kernels, without inserted conversions.

    Ops that the runtime fuses at startup appear under the name of the last.
    """
    model = model.as_given
    feeds = model.signature.bind_inputs(inputs)
    fetches = [tensor for tensor in model.signature.output_tensors if tensor not in feeds]
    (run,) = model.runner.trace_runs(feeds, fetches, 1)
    stats = list(_iterate_node_statistics(run))
    dtypes = {node.node_name: _list_output_dtypes(node) for node in stats}
    traced: dict[str, list[TracedKernel]] = {}
    for node in stats:
        op = model.written.get(node.node_name, node.node_name)
        label = _LABEL.search(node.timeline_label)
        if not op or node.node_name not in model.graph or label is None:
            continue
        if label["type"] == CONSTANT:
            continue  # computed during loading
        operands = [
            dtype
            for tensor in label["inputs"].split(", ")
            for dtype in dtypes.get(get_node_name(tensor), ())[:1]
        ]
        traced.setdefault(op, []).append(
            _make_traced_kernel(label["type"], [*_list_output_dtypes(node)[:1], *operands])
        )
    # The runtime fuses or drops many float ops, but no integer kernels.
    integers = (name for name, node in model.graph.nodes.items() if _INTEGER in node.op)
    reached = {op: build_op_trace(kernels) for op, kernels in traced.items()}
    return {**dict.fromkeys((model.written.get(n, n) for n in integers), NOT_REACHED), **reached}


def _iterate_node_statistics(run: StepStats) -> Iterator[NodeExecStats]:
    for device in run.dev_stats:
        yield from device.node_stats


def _list_output_dtypes(node: NodeExecStats) -> list[tf.DType]:
    return [tf.as_dtype(output.tensor_description.dtype) for output in node.output]


def _make_traced_kernel(name: str, dtypes: list[tf.DType]) -> TracedKernel:
    """Return a kernel, given the types of its first output and its inputs, in that order."""
    if _INTEGER in name:
        return TracedKernel(name, Precision.INT8, True)
    reads_bytes = any(dtype in _BYTES for dtype in dtypes)
    if dtypes and dtypes[0] in _BYTES:
        return TracedKernel(name, None, reads_bytes)
    precisions = (PRECISIONS[dtype] for dtype in dtypes if dtype in PRECISIONS)
    return TracedKernel(name, next(precisions, None), reads_bytes)


def time_ops(model: TensorFlowModel, inputs: object, runs: int) -> dict[str, list[float]]:
    """Return op (or conversion, by node name) → its seconds in each of N runs.

    Ops that the runtime fuses at startup appear under the name of the last, and count for their
    layer.
    """
    feeds = model.signature.bind_inputs(inputs)
    outputs = [tensor for tensor in model.signature.output_tensors if tensor not in feeds]
    timings: dict[str, list[float]] = defaultdict(list)
    for run in model.runner.trace_runs(feeds, outputs, runs):
        seconds: dict[str, float] = defaultdict(float)
        for node in _iterate_node_statistics(run):
            if node.node_name in model.graph:
                name = model.counted_for.get(node.node_name, node.node_name)
                seconds[name] += (node.op_end_rel_nanos - node.op_start_rel_nanos) * 1e-9
        for name, value in seconds.items():
            timings[name].append(value)
    return timings
