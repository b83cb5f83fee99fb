"""Quantization that a model itself contains (QDQ), read as ranges of float tensors.

Tools for quantization and for training with fake quantization write a QuantizeLinear and a
DequantizeLinear around every op. A plan needs the float ops between them; the scales become the
ranges of their tensors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes import common

from neural_mp.adaptors.onnxrt.graph.edit import GraphNames, get_constant_array, get_node_input
from neural_mp.adaptors.onnxrt.graph.subgraphs import in_order, replace_result
from neural_mp.adaptors.onnxrt.kernels import ops
from neural_mp.core.observations import Range

#: Keys in the `meta` of a value, of its range, and of a node, of the mark that it ran in integers.
SOURCE_RANGE, IN_INTEGERS = "neural_mp.source_range", "neural_mp.in_integers"


@dataclass(frozen=True)
class _Parameters:
    """Scale, zero point and integer type of a quantized tensor."""

    scale: float
    zero_point: int
    dtype: ir.DataType

    @property
    def value_range(self) -> Range:
        """The smallest and largest representable number."""
        limits = np.iinfo(self.dtype.numpy())
        low, high = (self.scale * (int(end) - self.zero_point) for end in (limits.min, limits.max))
        return low, high


def bypass_source_quantization(program: ir.Model, names: GraphNames) -> bool:
    """Bypass the quantization of computed tensors, in place; return whether there was any.

    A range from 0 on replaced a Relu, which is restored. Quantized weights stay as they are stored.
    """
    bypassed = False
    for node in list(in_order(program.graph)):
        data = node.inputs[0] if ops.is_quantize(node) else None
        parameters = _read_parameters(node) if data is not None else None
        if data is None or parameters is None or data.const_value is not None:
            continue
        if data.dtype not in (None, ir.DataType.FLOAT):
            continue
        bypassed |= _bypass_quantization(node, data, parameters, names)
    if bypassed:
        common.RemoveUnusedNodesPass()(program)
    return bypassed


def _bypass_quantization(
    node: ir.Node, data: ir.Value, parameters: _Parameters, names: GraphNames
) -> bool:
    (quantized,) = node.outputs
    whole = _is_only_dequantized(quantized, parameters)
    ends = [
        use.node
        for use in quantized.uses()
        if use.idx == 0 and _undoes_quantization(use.node, parameters)
    ]
    if not whole and not ends:
        return False
    value = _attach_range(node, data, parameters, names)
    _redirect_to_float(quantized, value, parameters, whole)
    return True


def _redirect_to_float(
    quantized: ir.Value, value: ir.Value, parameters: _Parameters, whole: bool
) -> None:
    """Replace a quantized tensor by a float one where it is dequantized, or moved until there."""
    for use in list(quantized.uses()):
        if ops.is_dequantize(use.node):
            if use.idx == 0 and _undoes_quantization(use.node, parameters):
                _replace_dequantized(use.node.outputs[0], value)
        elif whole:
            use.node.replace_input_with(use.idx, value)
            (result,) = use.node.outputs
            # A clone of a graph shares its types.
            result.type = ir.TensorType(ir.DataType.FLOAT)
            result.meta[SOURCE_RANGE] = value.meta[SOURCE_RANGE]
            _redirect_to_float(result, result, parameters, whole)


def _replace_dequantized(dequantized: ir.Value, value: ir.Value) -> None:
    for use in dequantized.uses():
        use.node.meta[IN_INTEGERS] = True
    node = dequantized.producer()
    assert node is not None
    replace_result(node, dequantized, value, f"{node.name}/copy")


def _attach_range(
    node: ir.Node, data: ir.Value, parameters: _Parameters, names: GraphNames
) -> ir.Value:
    """Return a tensor with its range, after the Relu that a range from 0 on stands for, if any."""
    low, high = parameters.value_range
    if _is_non_negative(data):
        # A signed scale wastes half of its numbers, and would need a Relu of its own.
        low = max(low, 0.0)
    elif low >= 0:
        data = _insert_relu_after(node, data, names)
    data.meta[SOURCE_RANGE] = low, high
    return data


def _insert_relu_after(node: ir.Node, data: ir.Value, names: GraphNames) -> ir.Value:
    relu = ir.node("Relu", [data], name=names.reserve_name(f"{data.name}/Relu"))
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, relu)
    (value,) = relu.outputs
    value.name, value.type, value.shape = (
        names.reserve_name(f"{data.name}/relu"),
        data.type,
        data.shape,
    )
    return value


def _is_non_negative(value: ir.Value) -> bool:
    producer = value.producer()
    while producer is not None and (
        _moves_any_value(producer) or (not producer.domain and producer.op_type in ops.KEEPS_SIGN)
    ):
        (source, *_) = producer.inputs
        producer = None if source is None else source.producer()
    if producer is None or producer.domain:
        return False
    if producer.op_type == "Clip":
        least = get_constant_array(get_node_input(producer, 1))
        return least is not None and bool((least >= 0).all())
    return producer.op_type in ops.NON_NEGATIVE


def _is_only_dequantized(quantized: ir.Value, parameters: _Parameters) -> bool:
    """Whether a quantized tensor is only dequantized with its own scale, or moved until there."""
    if quantized.is_graph_output() or not quantized.uses():
        return False
    return all(
        _undoes_quantization(use.node, parameters)
        or (
            use.idx == 0
            and _moves_any_value(use.node)
            and len(use.node.outputs) == 1
            and _is_only_dequantized(use.node.outputs[0], parameters)
        )
        for use in quantized.uses()
    )


def _undoes_quantization(node: ir.Node, parameters: _Parameters) -> bool:
    return ops.is_dequantize(node) and _read_parameters(node) == parameters


def _moves_any_value(node: ir.Node) -> bool:
    is_moving = ops.has_role(node, ops.Role.MOVING) and ops.get_op_row(node).fill is None
    return is_moving and node.op_type not in ops.STAYS_QUANTIZED


def _read_parameters(node: ir.Node) -> _Parameters | None:
    """Return the constant parameters of a tensor quantized as a whole; None for others."""
    third = get_node_input(node, 2)
    scale, zero = get_constant_array(get_node_input(node, 1)), get_constant_array(third)
    if scale is None or scale.size != 1 or (third is not None and zero is None):
        return None
    value = node.outputs[0] if ops.is_quantize(node) else node.inputs[0]
    dtype = third.dtype if third is not None else None
    dtype = dtype or (value.dtype if value is not None else None) or ir.DataType.UINT8
    if dtype not in (ir.DataType.UINT8, ir.DataType.INT8, ir.DataType.UINT16, ir.DataType.INT16):
        return None
    middle = 0 if zero is None else int(zero.reshape(()))
    return _Parameters(float(scale.reshape(())), middle, dtype)
