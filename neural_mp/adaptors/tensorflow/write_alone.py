"""Ops that read and write real numbers and hold their weights in bytes."""

from __future__ import annotations

import tensorflow as tf

from neural_mp.adaptors.common.integer_encoding import rounded_to_int8, weight_scales
from neural_mp.adaptors.common.tensor_forms import FP32
from neural_mp.adaptors.tensorflow.tensor_graph import NodeDef
from neural_mp.adaptors.tensorflow.tensor_variants import Forms


def write_table(forms: Forms, node: NodeDef, weight_limit: int) -> str:
    """Write an op that reads rows of a constant table: rows of bytes, each with its own scale.

    Returns:
        The name of the node that has the result.
    """
    name, table = node.name, forms.source.value(node.input[0])
    scales = weight_scales(table, (1,), weight_limit)
    integers = rounded_to_int8(table, scales, weight_limit)

    def read(constant: str, kind: tf.DType, word: str) -> str:
        inputs = [constant, *(forms.real(tensor) for tensor in node.input[1:])]
        types = {"Tparams": kind, **{key: node.attr[key] for key in ("Tindices", "Taxis")}}
        put = forms.graph.put(node.op, f"{name}/{word}", inputs, **types)
        forms.helpers[put] = name
        return put

    rows = read(forms.graph.put_constant(f"{name}/table_int8", integers), tf.int8, "rows")
    steps = read(forms.graph.put_constant(f"{name}/table_scale", scales), tf.float32, "scales")
    types = {"SrcT": tf.int8, "DstT": tf.float32}
    numbers = forms.graph.put("Cast", f"{name}/numbers", [rows], **types)
    written = forms.graph.put("Mul", forms.name_for(name, FP32), [numbers, steps], T=tf.float32)
    forms.put(name, FP32, written)
    return written
