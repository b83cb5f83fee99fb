"""One pass over calibration batches; every tensor is reduced within the graph, by the runtime."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.calibration import TensorSummary, sample_shares
from neural_mp.adaptors.common.signature import in_parts
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import Array, indexed
from neural_mp.adaptors.tensorflow.runtime import Runner

#: Bytes of input run at once: what a batch needs on its way grows with it.
_INPUT_BYTES = 8 << 20


def watch(
    model: TensorFlowModel, batches: Iterable[dict[str, Array]], tensors: Collection[str]
) -> Iterator[tuple[str, TensorSummary]]:
    """Run batches (tensor → array), and say what the named tensors held."""
    graph, weights = model.without_weights()
    with graph.as_default():
        drawn = tf.constant(sample_shares())
        reduced = {
            name: _reduced(graph.get_tensor_by_name(indexed(name)), drawn)
            for name in sorted(tensors)
        }
    fetches = [tensor.name for results in reduced.values() for tensor in results]
    runner = Runner(graph, weights, optimized=False)
    for feeds in batches:
        for part in _parts(model, feeds):
            found = map(np.asarray, runner(part, fetches))
            for name, results in reduced.items():
                size, sample, *rest = (next(found) for _ in results)
                if not size.size or not size:  # it lies in a branch not taken, or is empty
                    continue
                low, high, power, mean = map(np.atleast_1d, rest)
                yield name, TensorSummary(low, high, power, int(size) // len(power), sample, mean)


def _reduced(tensor: tf.Tensor, drawn: tf.Tensor) -> tuple[tf.Tensor, ...]:
    """How large a tensor is, samples of it, and the least, greatest, mean square and mean value.

    Args:
        tensor: of the graph that is the default.
        drawn: where to take samples, as shares of the length of the flat tensor.
    """
    # The ops themselves: what wraps them takes five times as long to build.
    ops = tf.raw_ops
    values = tensor if tensor.dtype == tf.float32 else ops.Cast(x=tensor, DstT=tf.float32)
    flat = ops.Reshape(tensor=values, shape=[-1])
    size = ops.Size(input=flat, out_type=tf.int64)
    places = ops.Mul(x=drawn, y=ops.Cast(x=size, DstT=tf.float64))
    others = tf.constant(list(range((tensor.shape.rank or 1) - 1)), tf.int32)
    return (
        size,
        ops.Gather(params=flat, indices=ops.Cast(x=places, DstT=tf.int64)),
        ops.Min(input=values, axis=others),
        ops.Max(input=values, axis=others),
        ops.Mean(input=ops.Square(x=values), axis=others),
        ops.Mean(input=values, axis=others),
    )


def _parts(model: TensorFlowModel, feeds: dict[str, Array]) -> Iterator[dict[str, Array]]:
    """A batch in parts small enough."""
    samples, total = model.signature.samples(feeds), sum(a.nbytes for a in feeds.values())
    return in_parts(feeds, samples, max(1, samples * _INPUT_BYTES // max(total, 1)))


def first_non_finite(model: TensorFlowModel, feeds: dict[str, Array]) -> str | None:
    """The first op whose result holds NaN or Inf."""
    graph, weights = model.without_weights()
    names, checks = [], []
    with graph.as_default():
        for node in model.op_nodes:
            operation: Any = graph.get_operation_by_name(node.name)
            if operation.outputs and operation.outputs[0].dtype.is_floating:
                finite = tf.reduce_all(tf.math.is_finite(operation.outputs[0]))
                names.append(model.counted_for.get(node.name, node.name))
                checks.append(finite.name)
    results = Runner(graph, weights, optimized=False)(feeds, checks)
    return next((name for name, fine in zip(names, results, strict=True) if not fine), None)
