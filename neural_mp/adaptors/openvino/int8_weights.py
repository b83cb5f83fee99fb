"""INT8 weights: constants with one scale per channel, and tables of rows with one scale each.

The CPU plugin multiplies such a weight of a product as stored even if no input is quantized; it
restores the weights of convolutions and recurrent layers to floats when it compiles a model.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from neural_mp.adaptors.common.quant_params import round_to_int8, weight_scales
from neural_mp.adaptors.openvino.graph_edit import array_of, source_of, weight_of
from neural_mp.adaptors.openvino.ops import Role, role_of, traits_of
from neural_mp.adaptors.openvino.runtime import ops
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array

#: Suffixes of the names of a weight: beside a quantized input, and of one stored alone.
WEIGHT, ALONE = "/weight", "/weight_alone"
#: Suffix of the name of the integer constant of a weight.
STORED = "/int8"
#: The zero point of a table in uint8.
_MIDDLE = 128


def weight_axes(node: Any, axes: int) -> tuple[int, ...]:
    """Return the axes of the output channels of a layer's weight."""
    if role_of(node) is Role.PRODUCT:
        return (axes - 2 if node.get_attributes()["transpose_b"] else axes - 1,)
    return traits_of(node).weight_outputs


def layer_weight(stem: str, node: Any, spec: QuantSpec) -> Any:
    """Return an int8 constant with its dequantization, in place of a layer's weight."""
    weight = np.asarray(array_of(weight_of(node)), np.float32)
    return dequantized(stem, weight, weight_axes(node, weight.ndim), spec)


def dequantized(stem: str, weight: Array, channels: tuple[int, ...], spec: QuantSpec) -> Any:
    """Return an int8 constant with its dequantization; `channels` are the axes with own scales."""
    axes = tuple(axis for axis in range(weight.ndim) if axis not in channels)
    limit = weight_qmax(spec)
    scales = weight_scales(weight, axes, limit)
    stored = ops.constant(round_to_int8(weight, scales, limit))
    stored.set_friendly_name(f"{stem}{STORED}")
    widened = ops.convert(stored, "f32")
    widened.set_friendly_name(f"{stem}/float")
    result = ops.multiply(widened, ops.constant(scales))
    result.set_friendly_name(stem)
    return result


def product_weight(stem: str, matrix: Array, spec: QuantSpec) -> Any:
    """Return an int8 constant with its dequantization, in place of a weight [outputs, inputs].

    A Reshape ends it: when OpenVINO infers shapes, a reshaped input gets sizes of the weight, and
    two readers of the multiplication would make the plugin restore the weight to floats.
    """
    scaled = dequantized(stem, matrix[:, None], (0,), spec)
    scaled.set_friendly_name(f"{stem}/scaled")
    result = ops.reshape(scaled, ops.constant(np.array(matrix.shape, np.int64)), False)
    result.set_friendly_name(stem)
    return result


def rows_of_table(stem: str, node: Any, spec: QuantSpec) -> list[Any]:
    """Return the nodes that read rows of a table in bytes, the result last.

    Codes and scales are read apart and multiplied: the plugin restores a whole table to floats if
    other tensors of the model are quantized. With uint8, which has a zero point, both steps run as
    one kernel.
    """
    table, limit = np.asarray(array_of(weight_of(node)), np.float32), weight_qmax(spec)
    scales = weight_scales(table, (1,), limit)
    codes = round_to_int8(table, scales, limit).astype(np.int16) + _MIDDLE
    stored = ops.constant(codes.astype(np.uint8))
    stored.set_friendly_name(f"{stem}{STORED}")
    indices, start = source_of(node, 1), ops.constant(np.int64(0))
    rows, steps = (ops.gather(values, indices, start) for values in (stored, ops.constant(scales)))
    widened = ops.convert(rows, "f32")
    centred = ops.subtract(widened, ops.constant(np.float32(_MIDDLE)))
    nodes = [rows, steps, widened, centred]
    for op, part in zip(nodes, ("rows", "scales", "float", "steps"), strict=True):
        op.set_friendly_name(f"{stem}/{part}")
    return [*nodes, ops.multiply(centred, steps)]
