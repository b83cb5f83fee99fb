"""Ops that read and write real numbers and hold their weights in bytes."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.tensor_forms import FP32
from neural_mp.adaptors.onnxrt.convert_gru import write_gru
from neural_mp.adaptors.onnxrt.graph_edit import known_array, put_input
from neural_mp.adaptors.onnxrt.kernel_registry import CONTRIB
from neural_mp.adaptors.onnxrt.quant_params import store_weight
from neural_mp.adaptors.onnxrt.tensor_variants import Forms
from neural_mp.core.precision import OpConfig

#: ONNX Runtime's LSTM that multiplies bytes, in its `ContribOperators.md`.
RECURRENT_KERNEL = "DynamicQuantizeLSTM"
#: The places of its weights, which an LSTM has in the same, and of their zero points; each has its
#: scales in the place before.
RECURRENT_WEIGHTS = ((1, 9), (2, 11))


def write_table(forms: Forms, node: ir.Node, config: OpConfig) -> None:
    """Write an op that reads rows of a constant table: rows of bytes, each with its own scale.

    They are standard ops, and together about as fast as the one: it is memory that such an op
    waits for.
    """
    assert config.weight is not None
    rows = node.inputs[1]
    assert rows is not None
    stored = store_weight(known_array(node.inputs[0]), 0, config.weight)
    stem = str(node.name)
    table = forms.names.constant(f"{stem}.table/{stored.integers.dtype}", stored.integers)
    scales = forms.names.constant(f"{stem}.table/scale", stored.scales.reshape(-1, 1))
    read = forms.real(rows)
    integers = forms.add("Gather", [table, read], f"{stem}/rows", ir.DataType.INT8)
    numbers = forms.add(
        "Cast", [integers], f"{stem}/cast", ir.DataType.FLOAT, {"to": int(ir.DataType.FLOAT)}
    )
    steps = forms.add("Gather", [scales, read], f"{stem}/scales", ir.DataType.FLOAT)
    result = forms.add("Mul", [numbers, steps], f"{stem}/real", ir.DataType.FLOAT)
    forms.put(node.outputs[0], FP32, result)


def write_recurrent(forms: Forms, node: ir.Node, config: OpConfig) -> None:
    """Write a recurrent layer that finds the range of what it multiplies on every run."""
    assert config.weight is not None
    if node.op_type == "GRU":
        write_gru(forms, node, config.weight)
        return
    for position, value in enumerate(node.inputs):
        if value is not None and position not in dict(RECURRENT_WEIGHTS):
            node.replace_input_with(position, forms.real(value))
    stem = str(node.name)
    for position, zero in RECURRENT_WEIGHTS:
        word = f"{stem}.weight_{position}"
        # [directions, rows, inputs], of which the kernel wants the last two turned round.
        turned = np.ascontiguousarray(known_array(node.inputs[position]).transpose(0, 2, 1))
        directions, _, columns = turned.shape
        stored = [store_weight(matrix, 1, config.weight) for matrix in turned]
        integers = np.stack([one.integers for one in stored])
        put_input(node, position, forms.names.constant(f"{word}/{integers.dtype}", integers))
        for place, name, parts in (
            (zero - 1, "scale", [one.scales for one in stored]),
            (zero, "zero_point", [one.zero_points for one in stored]),
        ):
            values = np.stack(parts).reshape(directions, columns)
            put_input(node, place, forms.names.constant(f"{word}/{name}", values))
    node.op_type, node.domain, node.version = RECURRENT_KERNEL, CONTRIB, None
    node.attributes.pop("layout", None)
