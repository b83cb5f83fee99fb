"""Which kernels ran for every op, from the runtime's own step statistics."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import tensorflow as tf
from tensorflow.core.framework.step_stats_pb2 import NodeExecStats, StepStats

from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.tensor_graph import CONSTANT, node_of
from neural_mp.core.kernel_trace import NOT_REACHED, OpTrace, TracedKernel, op_trace
from neural_mp.core.precision import Precision

#: What the statistics say of a kernel: `name = Type(input, other:1)`.
_LABEL = re.compile(r" = (?P<type>\w+)\((?P<inputs>[^)]*)\)")
#: Element type → precision of a kernel.
PRECISIONS = {
    tf.float32: Precision.FP32,
    tf.float64: Precision.FP32,
    tf.bfloat16: Precision.BF16,
    tf.float16: Precision.FP16,
}
_BYTES = (tf.quint8, tf.qint8, tf.uint8, tf.int8)
#: What the names of integer kernels have in them, with or without oneDNN's `_Mkl` before.
_INTEGER = "Quantized"


def trace(model: TensorFlowModel, inputs: Any) -> dict[str, OpTrace]:
    """Op → what ran for it; conversions that were put in are left out.

    Of ops that the runtime fuses as it starts, what ran bears the name of the last of them.
    """
    feeds = model.signature.bind(inputs)
    fetches = [tensor for tensor in model.signature.output_tensors if tensor not in feeds]
    (run,) = model.runner.traced(feeds, fetches, 1)
    stats = list(_statistics(run))
    dtypes = {node.node_name: _dtypes(node) for node in stats}
    found: dict[str, list[TracedKernel]] = {}
    for node in stats:
        op = model.written.get(node.node_name, node.node_name)
        label = _LABEL.search(node.timeline_label)
        if not op or node.node_name not in model.graph or label is None:
            continue
        if label["type"] == CONSTANT:
            continue  # computed as the model was loaded
        read = [
            dtype
            for tensor in label["inputs"].split(", ")
            for dtype in dtypes.get(node_of(tensor.removeprefix("^")), ())[:1]
        ]
        found.setdefault(op, []).append(_kernel(label["type"], [*_dtypes(node)[:1], *read]))
    # The runtime fuses or leaves out much of a graph, and of that no integer kernel.
    integers = (name for name, node in model.graph.nodes.items() if _INTEGER in node.op)
    reached = {op: op_trace(kernels) for op, kernels in found.items()}
    return {**dict.fromkeys((model.written.get(n, n) for n in integers), NOT_REACHED), **reached}


def _statistics(run: StepStats) -> Iterator[NodeExecStats]:
    for device in run.dev_stats:
        yield from device.node_stats


def _dtypes(node: NodeExecStats) -> list[tf.DType]:
    """The element types of what a kernel wrote."""
    return [tf.as_dtype(output.tensor_description.dtype) for output in node.output]


def _kernel(name: str, dtypes: list[tf.DType]) -> TracedKernel:
    """A kernel, by the types of what it writes and reads, the former first."""
    if _INTEGER in name:
        return TracedKernel(name, Precision.INT8, True)
    reads_bytes = any(dtype in _BYTES for dtype in dtypes)
    if dtypes and dtypes[0] in _BYTES:
        return TracedKernel(name, None, reads_bytes)
    known = (PRECISIONS[dtype] for dtype in dtypes if dtype in PRECISIONS)
    return TracedKernel(name, next(known, None), reads_bytes)


def time_ops(model: TensorFlowModel, inputs: Any, runs: int) -> dict[str, list[float]]:
    """Op (or conversion, by node name) → seconds of each of so many runs.

    The runtime fuses ops as it starts; a fused op bears the name of the last of them, and counts
    for the layer it belongs to.
    """
    feeds = model.signature.bind(inputs)
    outputs = [tensor for tensor in model.signature.output_tensors if tensor not in feeds]
    taken: dict[str, list[float]] = defaultdict(list)
    for run in model.runner.traced(feeds, outputs, runs):
        seconds: dict[str, float] = defaultdict(float)
        for device in run.dev_stats:
            for node in device.node_stats:
                if node.node_name in model.graph:
                    name = model.counted_for.get(node.node_name, node.node_name)
                    seconds[name] += node.op_end_rel_nanos * 1e-9 - node.op_start_rel_nanos * 1e-9
        for name, value in seconds.items():
            taken[name].append(value)
    return taken
