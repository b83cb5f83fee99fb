"""Ops that move or select values, run on stored numbers."""

from __future__ import annotations

import tensorflow as tf

from neural_mp.adaptors.common.integer_encoding import Encoding
from neural_mp.adaptors.common.tensor_forms import UINT8
from neural_mp.adaptors.tensorflow.convert_int8 import kernel_limits
from neural_mp.adaptors.tensorflow.integer_kernels import U8
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.padding import pad_stored
from neural_mp.adaptors.tensorflow.tensor_graph import (
    NodeDef,
    copied,
    integers_attribute,
    make_node,
    text_attribute,
)
from neural_mp.adaptors.tensorflow.tensor_variants import Forms

_POOLING = {"MaxPool": "QuantizedMaxPool", "AvgPool": "QuantizedAvgPool"}


def write_agnostic(
    forms: Forms, model: TensorFlowModel, node: NodeDef, moved: tuple[str, ...], encoding: Encoding
) -> str:
    """Write an op that passes INT8 on; returns the name of its node."""
    stored = [forms.stored(tensor) for tensor in moved]
    name = forms.name_for(node.name, UINT8)
    if node.op in _POOLING:
        limits = kernel_limits(forms, node.name, encoding)
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
        amounts = model.graph.value(node.input[1])
        shape = model.shapes[moved[0]]
        name = pad_stored(forms, stored[0], name, amounts, encoding.zero_point, shape)
    else:
        _write_on_bits(forms, node, stored, name)
    forms.put(node.name, UINT8, name)
    return name


def _write_on_bits(forms: Forms, node: NodeDef, stored: list[str], name: str) -> None:
    """The op itself, on uint8."""
    written = copied(node, forms.graph.unused(f"{name}/moved"))
    for position, tensor in enumerate(stored):
        written.input[position] = forms.bits(tensor, name)
    written.attr["T"].type = tf.uint8.as_datatype_enum
    forms.helpers[forms.graph.add(written)] = node.name
    forms.graph.add(make_node("Bitcast", name, [written.name], T=tf.uint8, type=U8))
