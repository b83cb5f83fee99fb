"""Layers whose channels can be scaled, and undone where they are read, with nothing changed.

Between a layer and those that read it, through ops that give x times as much for x times the input
(ReLU, pooling), every channel can be given a scale of its own: the weights of the writer are
multiplied by it, those of the readers divided. In FP32 the model computes the same; what is stored
in INT8 between them can be made to fill its range in every channel.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.core.graph import Op, OpGraph
from neural_mp.util.pytree import Array

#: Kinds of op (`neural_mp.amp.KINDS`) that give f·y for f·x, for any f > 0 a channel.
HOMOGENEOUS = ("relu", "leaky_relu", "identity")
#: Those that do so where they can pass on or join integers, which they do one by one channel.
_POOLING = ("max_pool", "avg_pool")
#: Of these kinds, and yet not homogeneous.
_THRESHOLDS = ("threshold", "ThresholdedRelu")


@dataclass(frozen=True)
class LayerParams:
    """The constants of a layer, or of a normalization that scales its channels.

    Attributes:
        result: the op that has its result: itself, or the one that adds its bias.
        weight: reads the weight.
        outputs: its axis of output channels.
        inputs: its axis of input channels, of one group; None where inputs are not scaled by it.
        groups: groups of channels that have nothing to do with each other.
        axis: the axis of the channels in what it reads and writes, from the end.
        pooled: whether pooling of what it writes keeps channels apart.
    """

    result: str
    weight: Callable[[], Array]
    outputs: int = 0
    inputs: int | None = None
    groups: int = 1
    axis: int = -1
    pooled: bool = False

    def matrix(self) -> Array:
        """The weight as [groups, outputs of a group, inputs of a group, taps]."""
        weight = np.asarray(self.weight(), np.float32)
        if self.inputs is None:
            return weight.reshape(-1, 1, 1, 1)
        moved = np.moveaxis(weight, (self.outputs, self.inputs), (0, 1))
        count = moved.shape[0]
        return moved.reshape(self.groups, count // self.groups, moved.shape[1], -1)

    @property
    def depthwise(self) -> bool:
        """Whether every output reads one input channel."""
        return self.inputs is not None and np.shape(self.weight())[self.inputs] == 1

    def input_limits(self) -> Array:
        """The largest weight that every input channel meets, shape [channels].

        As shares of the largest weight of the same output, which has steps of its own: how large
        an output is says nothing about what it reads.
        """
        sizes = np.abs(self.matrix())
        largest = sizes.max(axis=(2, 3), keepdims=True)
        shares = sizes / np.where(largest > 0, largest, 1)
        return np.asarray(shares.max(axis=(1, 3)).reshape(-1))

    def output_limits(self) -> Array:
        """The largest weight of every output channel, shape [channels]."""
        return np.asarray(np.abs(self.matrix()).max(axis=(2, 3)).reshape(-1))


@dataclass(frozen=True)
class LayerRescale:
    """What is done to the constants of a layer.

    Attributes:
        outputs: what weight and bias are multiplied by, shape [output channels]; None for nothing.
        inputs: what the weight is multiplied by, shape [input channels].
        shift: what is added to the bias then, shape [output channels].
    """

    outputs: Array | None = None
    inputs: Array | None = None
    shift: Array | None = None

    def weight(self, layer: LayerParams) -> Array:
        """The weight with it, in its own shape."""
        weight = np.asarray(layer.weight())
        changed = weight.astype(np.float64)
        if self.outputs is not None:
            changed *= _along(self.outputs, layer.outputs, weight.ndim)
        if self.inputs is not None:
            assert layer.inputs is not None
            changed = self._inputs_scaled(changed, layer.outputs, layer.inputs, layer.groups)
        return changed.astype(weight.dtype)

    def _inputs_scaled(self, weight: Array, outputs: int, inputs: int, groups: int) -> Array:
        assert self.inputs is not None
        moved = np.moveaxis(weight, (outputs, inputs), (0, 1))
        # Row g of the factors is for the outputs of group g.
        rows = self.inputs.reshape(groups, -1).repeat(moved.shape[0] // groups, axis=0)
        scaled = moved * rows.reshape(*rows.shape, *[1] * (weight.ndim - 2))
        return np.moveaxis(scaled, (0, 1), (outputs, inputs))

    def bias(self, bias: Array | None, channels: int) -> Array:
        """The bias with it; of a layer that has none, what takes its place."""
        changed = np.zeros(channels) if bias is None else np.asarray(bias, np.float64)
        if self.outputs is not None:
            changed = changed * self.outputs
        if self.shift is not None:
            changed = changed + self.shift
        return changed.astype(np.float32 if bias is None else bias.dtype)


def _along(factors: Array, axis: int, ndim: int) -> Array:
    return factors.reshape([-1 if index == axis else 1 for index in range(ndim)])


def rounded_weight(matrix: Array, limit: int) -> Array:
    """A weight rounded to INT8, symmetric, with one scale an output channel, as real numbers.

    Args:
        matrix: shape [groups, outputs, inputs, taps].
        limit: the largest integer, 127 or 63.
    """
    scales = weight_scales(matrix, (2, 3), limit)
    return np.asarray(round_to_int8(matrix, scales, limit) * scales.astype(np.float64))


@dataclass(frozen=True)
class ScalingGroup:
    """A writer and its readers, with nothing between them that minds the scale of a channel.

    Attributes:
        producer: the layer or normalization.
        consumers: the layers that read it.
        tensors: the ops between them whose results are scaled along, the writer's first.
    """

    producer: str
    consumers: tuple[str, ...]
    tensors: tuple[str, ...]


def find_links(
    graph: OpGraph,
    kinds: Mapping[str, str],
    layers: Mapping[str, LayerParams],
    keepers: Collection[str] = (),
) -> Iterator[ScalingGroup]:
    """Everything in a graph whose channels can be scaled.

    Args:
        graph: the model.
        kinds: op type → kind (`neural_mp.amp.KINDS`).
        layers: op → its constants.
        keepers: ops that only move values, and leave every channel where it is.
    """
    outputs = set(graph.outputs)
    for writer, layer in layers.items():
        tensors: dict[str, None] = {}
        readers: dict[str, None] = {}
        waiting, fits = [layer.result], layer.result == writer or _leads_to(graph, writer, layer)
        while waiting and fits:
            tensor = waiting.pop()
            tensors[tensor] = None
            consumers = graph.consumers(tensor)
            fits = bool(consumers) and tensor not in outputs
            for op in consumers:
                reads = layers.get(op.name)
                if reads is not None and _undoes(reads, layer) and op.inputs == (tensor,):
                    readers[op.name] = None
                elif op.name in keepers or is_homogeneous(op, kinds.get(op.type), layer.pooled):
                    waiting.append(op.name)
                    fits = fits and op.inputs == (tensor,)
                else:
                    fits = False
        if fits and readers:
            yield ScalingGroup(writer, tuple(readers), tuple(tensors))


def _leads_to(graph: OpGraph, writer: str, layer: LayerParams) -> bool:
    """Whether nothing but its bias reads a layer."""
    return [op.name for op in graph.consumers(writer)] == [layer.result]


def _undoes(reader: LayerParams, writer: LayerParams) -> bool:
    """Whether the input channels of one layer are the output channels of another."""
    return reader.inputs is not None and reader.axis == writer.axis


def is_homogeneous(op: Op, kind: str | None, pooled: bool) -> bool:
    """Whether an op gives f·y for f·x, channel by channel.

    Args:
        op: the op.
        kind: its kind.
        pooled: whether pooling keeps the channels apart.
    """
    pools = kind in _POOLING and pooled and (op.quantize_agnostic or op.joins_int8)
    return pools or (kind in HOMOGENEOUS and op.type not in _THRESHOLDS)
