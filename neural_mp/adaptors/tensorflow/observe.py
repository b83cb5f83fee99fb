"""One pass over calibration batches; every tensor is reduced within the graph, by the runtime."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.calibration import TensorSummary, sample_shares
from neural_mp.adaptors.common.signature import in_parts
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import (
    CONSTANT,
    Array,
    TensorGraph,
    without_large,
)
from neural_mp.adaptors.tensorflow.runtime import Runner, imported

#: Bytes of input run at once: what a batch needs on its way grows with it.
_INPUT_BYTES = 8 << 20
#: Where the runtime takes fed memory without copying it.
_ALIGNMENT = 64


@dataclass(frozen=True)
class _Reduced:
    """The tensors that say what one tensor of the model held."""

    low: tf.Tensor
    high: tf.Tensor
    power: tf.Tensor
    size: tf.Tensor
    sample: tf.Tensor
    mean: tf.Tensor

    @classmethod
    def of(cls, tensor: tf.Tensor, drawn: tf.Tensor) -> _Reduced:
        """Put the reductions behind a tensor.

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
        return cls(
            ops.Min(input=values, axis=others),
            ops.Max(input=values, axis=others),
            ops.Mean(input=ops.Square(x=values), axis=others),
            size,
            ops.Gather(params=flat, indices=ops.Cast(x=places, DstT=tf.int64)),
            ops.Mean(input=values, axis=others),
        )

    def names(self) -> list[str]:
        """What to fetch."""
        return [tensor.name for tensor in vars(self).values()]


def watch(
    model: TensorFlowModel, batches: Iterable[dict[str, Array]], tensors: Collection[str]
) -> Iterator[tuple[str, TensorSummary]]:
    """Run batches (tensor → array), and say what the named tensors held."""
    graph, weights = _without_weights(model.graph)
    with graph.as_default():
        drawn = tf.constant(sample_shares())
        reduced = {
            name: _Reduced.of(graph.get_tensor_by_name(f"{name}:0"), drawn)
            for name in sorted(tensors)
        }
    fetches = [name for item in reduced.values() for name in item.names()]
    runner = Runner(graph, optimized=False)
    for feeds in batches:
        for part in _parts(model, feeds):
            found = iter(runner({**part, **weights}, fetches))
            for name in reduced:
                low, high, power, size, sample, mean = (np.asarray(next(found)) for _ in range(6))
                if not size.size or not size:  # it lies in a branch not taken, or is empty
                    continue
                low, high, power, mean = map(np.atleast_1d, (low, high, power, mean))
                yield name, TensorSummary(low, high, power, int(size) // len(power), sample, mean)


def _without_weights(graph: TensorGraph) -> tuple[tf.Graph, dict[str, Array]]:
    """The graph with placeholders for its large constants, and the constants to feed.

    A session copies the constants of its graph half a dozen times; what is fed is copied once.
    """
    light, large = without_large(graph)
    return imported(light), {name: _aligned(graph.constant(name)) for name in large}


def _aligned(value: Array | None) -> Array:
    assert value is not None
    room = np.empty(value.nbytes + _ALIGNMENT, np.uint8)
    start = -room.ctypes.data % _ALIGNMENT
    aligned = room[start : start + value.nbytes].view(value.dtype).reshape(value.shape)
    aligned[...] = value
    return aligned


def _parts(model: TensorFlowModel, feeds: dict[str, Array]) -> Iterator[dict[str, Array]]:
    """A batch in parts small enough."""
    samples, total = model.signature.samples(feeds), sum(a.nbytes for a in feeds.values())
    return in_parts(feeds, samples, max(1, samples * _INPUT_BYTES // max(total, 1)))


def first_non_finite(model: TensorFlowModel, feeds: dict[str, Array]) -> str | None:
    """The first op whose result holds NaN or Inf."""
    graph, weights = _without_weights(model.graph)
    fed = {port.tensor for port in model.signature.inputs}
    names, checks = [], []
    with graph.as_default():
        for name, node in model.graph.nodes.items():
            operation: Any = graph.get_operation_by_name(name)
            if node.op == CONSTANT or name in fed or not operation.outputs:
                continue
            if operation.outputs[0].dtype.is_floating:
                finite = tf.reduce_all(tf.math.is_finite(operation.outputs[0]))
                names.append(model.counted_for.get(name, name))
                checks.append(finite.name)
    results = Runner(graph, optimized=False)({**feeds, **weights}, checks)
    return next((name for name, fine in zip(names, results, strict=True) if not fine), None)
