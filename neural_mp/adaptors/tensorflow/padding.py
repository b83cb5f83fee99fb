"""Padding of quantized tensors with their zero point.

The integer kernels pad with the integer 0, which is the zero point only of non-negative tensors.
Other tensors are padded by a separate op before the kernel.
"""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.signature import Shape
from neural_mp.adaptors.tensorflow.integer_kernels import U8
from neural_mp.adaptors.tensorflow.layer_folding import same_paddings
from neural_mp.adaptors.tensorflow.tensor_graph import (
    Array,
    NodeDef,
    TensorGraph,
    integers_attribute,
    text_attribute,
)
from neural_mp.adaptors.tensorflow.tensor_variants import Forms

#: Channels → integer type that holds several of them: padding single bytes is 20 times slower.
_WIDE = {8: (tf.int64, np.int64), 4: (tf.int32, np.int32), 2: (tf.int16, np.int16)}


def padding_of(node: NodeDef, weight: Array, source: Shape) -> Array | None:
    """Return a convolution's zero padding, [4, 2]; None if it depends on the input's size.

    Args:
        node: Conv2D or DepthwiseConv2dNative, channels last.
        weight: its weight, [height, width, …].
        source: shape of the input.
    """
    padding = text_attribute(node, "padding")
    if padding == "VALID":
        return np.zeros((4, 2), np.int32)
    if padding == "EXPLICIT":
        return np.array(integers_attribute(node, "explicit_paddings"), np.int32).reshape(4, 2)
    return same_paddings(node, weight, source)


def pad_stored(
    forms: Forms, stored: str, name: str, amounts: Array, zero_point: int, shape: Shape
) -> str:
    """Pad a quantized tensor; return the name of the node.

    Args:
        forms: tensors of the graph being written.
        stored: quantized tensor.
        name: name of the result.
        amounts: padding before and after every axis, [axes, 2].
        zero_point: integer that represents zero.
        shape: shape of the tensor as far as known.
    """
    graph = forms.graph
    told = graph.put_constant(f"{name}/amounts", amounts.astype(np.int32))
    last = forms.bits(stored, name)
    width = _together(shape, amounts)
    kind, number = _WIDE.get(width, (tf.uint8, np.uint8))
    zero = np.full(width, zero_point, np.uint8).view(number)[0]
    if width > 1:
        assert shape is not None
        sizes = [size or -1 for size in shape]
        split = [-1, *sizes[1:3], sizes[3] // width, width]
        last = _reshaped(graph, last, f"{name}/split", split)
        last = graph.put("Bitcast", f"{name}/wide", [last], T=tf.uint8, type=kind)
    value = graph.put_constant(f"{name}/zero", zero)
    last = graph.put("PadV2", f"{name}/padded", [last, told, value], T=kind, Tpaddings=tf.int32)
    if width > 1:
        last = graph.put("Bitcast", f"{name}/bytes", [last], T=kind, type=tf.uint8)
        after = [size + int(amounts[axis].sum()) for axis, size in enumerate(sizes)]
        last = _reshaped(graph, last, f"{name}/joined", [-1, *after[1:3], sizes[3]])
    return graph.put("Bitcast", name, [last], T=tf.uint8, type=U8)


def _together(shape: Shape, amounts: Array) -> int:
    """Return the number of channels that can be padded as one integer."""
    if shape is None or len(shape) != 4 or None in shape[1:] or amounts[3].any():
        return 1
    return next((width for width in _WIDE if (shape[3] or 1) % width == 0), 1)


def _reshaped(graph: TensorGraph, tensor: str, name: str, sizes: list[int]) -> str:
    told = graph.put_constant(f"{name}/sizes", np.array(sizes, np.int32))
    return graph.put("Reshape", name, [tensor, told], T=tf.uint8, Tshape=tf.int32)
