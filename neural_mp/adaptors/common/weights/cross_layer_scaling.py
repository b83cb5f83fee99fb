"""Layers whose channels can be rescaled, with the inverse in their consumers.

Between a layer and its consumers, through positively homogeneous ops (ReLU, pooling), every channel
can have its own scale: the weights of the producer are multiplied by the scale, those of the
consumers divided. The FP32 function stays the same, but INT8 tensors in between can fill their
range in every channel. All layers are products with matrices: a convolution is one with the values
in its window.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.core.graph import Op, OpGraph
from neural_mp.util.pytree import Array

#: Kinds of op (`neural_mp.amp.KINDS`) with op(f·x) = f·op(x), for any f > 0 per channel.
HOMOGENEOUS = ("relu", "leaky_relu", "identity")
#: Kinds that are homogeneous if they pass on or join integers, channel by channel.
_POOLING = ("max_pool", "avg_pool")
#: Op types of these kinds that are not homogeneous.
_THRESHOLDS = ("threshold", "ThresholdedRelu")

Floats = NDArray[np.float32]


@dataclass(frozen=True)
class LayerParams:
    """The constants of a layer, or of a normalization that scales its channels.

    Attributes:
        result: the op with the result: the layer itself, or the op that adds its bias.
        weight: reads the weight.
        outputs: the output channel axis of the weight.
        inputs: the input channel axis of the weight, within a group; None if not rescalable.
        groups: number of independent channel groups.
        axis: the channel axis of input and output, from the end.
        pooled: whether pooling of the result keeps channels separate.
        window: the window of a convolution; None for other layers, or if unknown.
        shifts: whether the result can be shifted, by a bias that is there or can be added.
    """

    result: str
    weight: Callable[[], Array]
    outputs: int = 0
    inputs: int | None = None
    groups: int = 1
    axis: int = -1
    pooled: bool = False
    window: Window | None = None
    shifts: bool = True

    def as_matrix(self) -> Array:
        """Return the weight as [groups, outputs of a group, inputs of a group, taps]."""
        weight = np.asarray(self.weight(), np.float32)
        if self.inputs is None:
            return weight.reshape(-1, 1, 1, 1)
        moved = np.moveaxis(weight, (self.outputs, self.inputs), (0, 1))
        count = moved.shape[0]
        return moved.reshape(self.groups, count // self.groups, moved.shape[1], -1)

    def like_weight(self, matrix: Array) -> Array:
        """Return a `matrix` in the shape of the weight, as a float32 copy."""
        moved = matrix.reshape(-1, matrix.shape[2], *self.taps)
        return np.array(np.moveaxis(moved, (0, 1), self._channel_axes), np.float32)

    @property
    def taps(self) -> tuple[int, ...]:
        """The sizes of the weight besides channels: those of the window of a convolution."""
        shape = np.shape(self.weight())
        return tuple(size for axis, size in enumerate(shape) if axis not in self._channel_axes)

    @property
    def has_rows(self) -> bool:
        """Whether `extract_rows` are known."""
        return self.inputs is not None and (self.window is None) == (not self.taps)

    def extract_rows(self, values: Array, most: int, seed: int) -> Floats:
        """Return what the layer multiplies by `as_matrix`, float32 [groups, rows, inputs · taps].

        Of more than `most` rows, a random choice, the same for the same seed and shape of `values`.
        """
        moved = np.moveaxis(values, self.axis, 1) if values.ndim > 1 else values.reshape(1, -1)
        if self.window is None:
            flat = np.moveaxis(moved, 1, -1).reshape(-1, moved.shape[1])
            chosen = flat[_choose_positions(len(flat), most, seed)]
            return np.asarray(chosen[None], np.float32)
        taps = self.taps
        view = self.window.slide_over(moved, taps)
        positions = view.shape[0], *view.shape[2 : 2 + len(taps)]
        picked = np.unravel_index(_choose_positions(int(np.prod(positions)), most, seed), positions)
        rows = np.moveaxis(view, 1, 1 + len(taps))[picked]  # [rows, channels, taps…]
        shaped = np.asarray(rows, np.float32).reshape(len(rows), self.groups, -1)
        return np.ascontiguousarray(shaped.swapaxes(0, 1))

    @property
    def _channel_axes(self) -> tuple[int, int]:
        assert self.inputs is not None
        return self.outputs, self.inputs

    @property
    def is_depthwise(self) -> bool:
        """Whether every output depends on one input channel."""
        return self.inputs is not None and np.shape(self.weight())[self.inputs] == 1

    def max_input_weights(self) -> Array:
        """Return the largest weight of every input channel, shape [channels].

        As a fraction of the largest weight of the same output: outputs have scales of their own, so
        their magnitude is irrelevant to the inputs.
        """
        sizes = np.abs(self.as_matrix())
        largest = sizes.max(axis=(2, 3), keepdims=True)
        shares = sizes / np.where(largest > 0, largest, 1)
        # One axis at a time: numpy takes five times as long for both, as rows of taps are short.
        return np.asarray(shares.max(axis=1).max(axis=-1).reshape(-1))

    def max_output_weights(self) -> Array:
        """Return the largest weight of every output channel, shape [channels]."""
        return np.asarray(np.abs(self.as_matrix()).max(axis=(2, 3)).reshape(-1))


@dataclass(frozen=True)
class LayerRescale:
    """A change to the constants of a layer.

    Attributes:
        outputs: factors of weight and bias, shape [output channels]; None for no change.
        inputs: factors of the weight, shape [input channels].
        shift: added to the bias afterwards, shape [output channels].
        rounded: replaces the weight, in its shape.
    """

    outputs: Array | None = None
    inputs: Array | None = None
    shift: Array | None = None
    rounded: Array | None = None

    def rescale_weight(self, layer: LayerParams) -> Array:
        """Return the changed weight, in its original shape."""
        weight = np.asarray(layer.weight())
        if self.rounded is not None:
            return self.rounded.astype(weight.dtype)
        changed = weight.astype(np.float64)
        # Views of `changed`
        if self.outputs is not None:
            by_output = np.moveaxis(changed, layer.outputs, -1)
            by_output *= self.outputs
        if self.inputs is not None:
            assert layer.inputs is not None
            by_pair = np.moveaxis(changed, (layer.outputs, layer.inputs), (0, 1))
            # Row g of the factors applies to the outputs of group g.
            rows = self.inputs.reshape(layer.groups, -1)
            rows = rows.repeat(len(by_pair) // layer.groups, axis=0)
            by_pair *= rows.reshape(*rows.shape, *[1] * (weight.ndim - 2))
        return changed.astype(weight.dtype)

    def rescale_bias(self, bias: Array | None, channels: int) -> Array:
        """Return the changed bias; for a layer without bias, the new bias."""
        changed = np.zeros(channels) if bias is None else np.asarray(bias, np.float64)
        if self.outputs is not None:
            changed = changed * self.outputs
        if self.shift is not None:
            changed = changed + self.shift
        return changed.astype(np.float32 if bias is None else bias.dtype)


def round_int8_weight(matrix: Array, limit: int, axes: tuple[int, ...] = (2, 3)) -> Array:
    """Return a weight rounded to INT8 per output channel, as float64.

    `axes` are all except those of the output channels, by default of `LayerParams.as_matrix`.
    """
    scales = weight_scales(matrix, axes, limit)
    return np.asarray(round_to_int8(matrix, scales, limit) * scales.astype(np.float64))


@dataclass(frozen=True)
class ScalingGroup:
    """A producer and its consumers, with only homogeneous ops in between.

    Attributes:
        producer: the layer or normalization.
        consumers: the layers that read its result.
        tensors: the ops in between whose results are rescaled, the producer's first.
    """

    producer: str
    consumers: tuple[str, ...]
    tensors: tuple[str, ...]


def find_scaling_groups(
    graph: OpGraph,
    kinds: Mapping[str, str],
    layers: Mapping[str, LayerParams],
    preserving: Collection[str] = (),
    through_products: bool = False,
) -> Iterator[ScalingGroup]:
    """Yield every scaling group of a graph; `preserving` leave every channel in place.

    With `through_products`, factors also pass an op that multiplies two computed tensors.
    """
    outputs = set(graph.outputs)
    for producer, layer in layers.items():
        tensors: dict[str, None] = {}
        readers: dict[str, None] = {}
        waiting = [layer.result]
        only_bias = [op.name for op in graph.consumers(producer)] == [layer.result]
        is_valid = layer.result == producer or only_bias
        while waiting and is_valid:
            tensor = waiting.pop()
            tensors[tensor] = None
            consumers = graph.consumers(tensor)
            is_valid = bool(consumers) and tensor not in outputs
            for op in consumers:
                reader, kind = layers.get(op.name), kinds.get(op.type)
                input_axis = None if reader is None or reader.inputs is None else reader.axis
                # Another computed tensor is multiplied by this one.
                is_product = kind == "mul" and len(op.inputs) == 2 and op.inputs.count(tensor) == 1
                if input_axis == layer.axis and op.inputs == (tensor,):
                    readers[op.name] = None
                elif through_products and is_product:
                    waiting.append(op.name)
                elif op.name in preserving or is_homogeneous(op, kind, layer.pooled):
                    waiting.append(op.name)
                    is_valid = is_valid and op.inputs == (tensor,)
                else:
                    is_valid = False
        if is_valid and readers:
            yield ScalingGroup(producer, tuple(readers), tuple(tensors))


def is_homogeneous(op: Op, kind: str | None, pooled: bool) -> bool:
    """Whether op(f·x) = f·op(x) for any f > 0, channel by channel.

    `pooled` states whether pooling keeps channels separate.
    """
    pools = kind in _POOLING and pooled and (op.quantize_agnostic or op.joins_int8)
    return pools or (kind in HOMOGENEOUS and op.type not in _THRESHOLDS)


@dataclass(frozen=True)
class Window:
    """The positions of a convolution's window, per spatial axis.

    Attributes:
        strides, dilations: steps of the window, and between its taps.
        pads: zeros before and after; None for as many as an output of input / stride needs, the odd
            zero after.
        odd_before: without `pads`, whether the odd zero is before.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    pads: tuple[tuple[int, int], ...] | None
    odd_before: bool = False

    def slide_over(self, values: Array, taps: Sequence[int]) -> Array:
        """Return a view [samples, channels, positions…, taps…] of values [samples, channels, …]."""
        spans = [step * (count - 1) + 1 for step, count in zip(self.dilations, taps, strict=True)]
        pads = list(self.pads or ())
        if not pads:  # enough for a result at every stride
            for size, stride, span in zip(values.shape[2:], self.strides, spans, strict=True):
                total = max((-(-size // stride) - 1) * stride + span - size, 0)
                leading = total - total // 2 if self.odd_before else total // 2
                pads.append((leading, total - leading))
        padded = np.pad(values, ((0, 0), (0, 0), *pads))
        axes = tuple(range(2, values.ndim))
        view = sliding_window_view(padded, spans, axis=axes)
        steps = (*self.strides, *self.dilations)
        windows: Array = view[(slice(None), slice(None), *(slice(None, None, s) for s in steps))]
        return windows


def _choose_positions(count: int, most: int, seed: int) -> NDArray[np.intp]:
    if count <= most:
        return np.arange(count)
    return np.sort(np.random.default_rng([seed, count]).choice(count, most, replace=False))
