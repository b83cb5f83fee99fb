"""Ops that move or select values, run on stored numbers."""

from __future__ import annotations

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.forms import UINT8, Forms
from neural_mp.adaptors.tensorflow.kernels import U8, Encoding
from neural_mp.adaptors.tensorflow.layers import kernel_limits
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import (
    NodeDef,
    data_inputs,
    integers_attribute,
    make_node,
    plain,
    text_attribute,
)

_POOLING = {"MaxPool": "QuantizedMaxPool", "AvgPool": "QuantizedAvgPool"}


def write_carrier(
    forms: Forms, model: TensorFlowModel, node: NodeDef, moved: tuple[str, ...], encoding: Encoding
) -> str:
    """Write an op that passes INT8 on; returns the name of its node."""
    stored = [forms.stored(tensor, False) for tensor in moved]
    name = forms.name_for(node.name, UINT8)
    if node.op in _POOLING:
        limits = kernel_limits(forms, node.name, encoding, False)
        forms.graph.add(
            make_node(
                _POOLING[node.op],
                name,
                [stored[0], *limits],
                T=U8,
                ksize=integers_attribute(node, "ksize"),
                strides=integers_attribute(node, "strides"),
                padding=text_attribute(node, "padding"),
            )
        )
    elif node.op == "Pad":
        _write_pad(forms, model, node, stored[0], name, encoding.zero_point)
    else:
        _write_on_bits(forms, node, stored, name)
    forms.put(node.name, UINT8, name)
    return name


def _bits(forms: Forms, stored: str, name: str) -> str:
    unused = forms.graph.unused(f"{name}/bits")
    return forms.graph.add(make_node("Bitcast", unused, [stored], T=U8, type=tf.uint8))


def _write_on_bits(forms: Forms, node: NodeDef, stored: list[str], name: str) -> None:
    """The op itself, on uint8: every op that moves values has a kernel for that."""
    written = NodeDef()
    written.CopyFrom(node)
    written.name = forms.graph.unused(f"{name}/moved")
    for position, tensor in enumerate(stored):
        written.input[position] = _bits(forms, tensor, name)
    written.attr["T"].type = tf.uint8.as_datatype_enum
    forms.graph.add(written)
    forms.graph.add(make_node("Bitcast", name, [written.name], T=tf.uint8, type=U8))


def _write_pad(
    forms: Forms, model: TensorFlowModel, node: NodeDef, stored: str, name: str, zero_point: int
) -> None:
    """Pad with the stored number that stands for zero.

    Padding single bytes is 20 times slower than padding 8 at once as one int64, so that is done
    where the channels allow.
    """
    graph = forms.graph
    amounts = model.graph.constant(node.input[1])
    assert amounts is not None
    before = model.shapes[plain(data_inputs(node)[0])][0]
    wide = before is not None and len(before) == 4 and None not in before[1:]
    if not wide or before is None or (before[3] or 0) % 8 or amounts[3].any():
        value = forms.constant(f"{name}/zero", np.uint8(zero_point))
        padded = graph.add(
            make_node(
                "PadV2",
                graph.unused(f"{name}/padded"),
                [_bits(forms, stored, name), node.input[1], value],
                T=tf.uint8,
                Tpaddings=tf.as_dtype(amounts.dtype),
            )
        )
        graph.add(make_node("Bitcast", name, [padded], T=tf.uint8, type=U8))
        return
    sizes = [size or 0 for size in before]
    after = [size + int(amounts[axis].sum()) for axis, size in enumerate(sizes)]
    eights = forms.constant(
        f"{name}/eights", np.array([-1, sizes[1], sizes[2], sizes[3] // 8, 8], np.int32)
    )
    ones = forms.constant(f"{name}/ones", np.array([-1, after[1], after[2], sizes[3]], np.int32))
    value = forms.constant(f"{name}/zero", np.full(8, zero_point, np.uint8).view(np.int64)[0])
    split = graph.unused(f"{name}/split")
    graph.add(
        make_node(
            "Reshape", split, [_bits(forms, stored, name), eights], T=tf.uint8, Tshape=tf.int32
        )
    )
    longs, padded = graph.unused(f"{name}/longs"), graph.unused(f"{name}/padded")
    graph.add(make_node("Bitcast", longs, [split], T=tf.uint8, type=tf.int64))
    graph.add(
        make_node(
            "PadV2",
            padded,
            [longs, node.input[1], value],
            T=tf.int64,
            Tpaddings=tf.as_dtype(amounts.dtype),
        )
    )
    shorts, joined = graph.unused(f"{name}/shorts"), graph.unused(f"{name}/joined")
    graph.add(make_node("Bitcast", shorts, [padded], T=tf.int64, type=tf.uint8))
    graph.add(make_node("Reshape", joined, [shorts, ones], T=tf.uint8, Tshape=tf.int32))
    graph.add(make_node("Bitcast", name, [joined], T=tf.uint8, type=U8))
