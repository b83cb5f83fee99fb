"""Conversion of products and tables to weights in groups, see `n_bits`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.weights.grouped_weight import (
    GroupedWeight,
    GroupParameters,
    Quantizer,
)
from neural_mp.adaptors.onnxrt import n_bits
from neural_mp.adaptors.onnxrt.convert_int8 import matrix_and_bias
from neural_mp.adaptors.onnxrt.fusion import is_table
from neural_mp.adaptors.onnxrt.graph_edit import known_array
from neural_mp.adaptors.onnxrt.tensor_variants import Variants
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.pytree import Array


def write_grouped(
    variants: Variants, node: ir.Node, spec: QuantSpec, grouped: GroupedWeight | None = None
) -> None:
    """Convert an op whose weight is stored in groups; inputs and outputs stay float.

    Stores `grouped`, if given, instead of rounding the weight.
    """
    if is_table(node):
        _write_table(variants, node, spec, grouped)
    else:
        _write_product(variants, node, spec, grouped)


def _write_product(
    variants: Variants, node: ir.Node, spec: QuantSpec, grouped: GroupedWeight | None
) -> None:
    matrix, bias = matrix_and_bias(node)
    stored = grouped or _nearest(np.ascontiguousarray(matrix.T), spec)
    operator = n_bits.product(stored, spec)
    data = node.inputs[0]
    assert data is not None
    floats = variants.real(data)
    if stored.input_factors is not None:
        factors = variants.names.constant(f"{node.name}.input_factors", stored.input_factors)
        name = f"{node.name}/scaled_inputs"
        floats = variants.add("Mul", [floats, factors], name, ir.DataType.FLOAT)
    inputs = [floats, *_constants(variants, node, operator)]
    if bias is not None:
        # Between are zero points, omitted if symmetric, and the order of the inputs.
        inputs += [None] * (n_bits.BIAS - len(inputs))
        inputs.append(variants.names.constant(f"{node.name}.bias", bias.astype(np.float32)))
    variants.replace(node, n_bits.PRODUCT, inputs, node.outputs[0], operator.attributes)


def _write_table(
    variants: Variants, node: ir.Node, spec: QuantSpec, grouped: GroupedWeight | None
) -> None:
    operator = n_bits.table(grouped or _nearest(known_array(node.inputs[0]), spec), spec)
    codes, *parameters = _constants(variants, node, operator)
    rows = node.inputs[1]
    assert rows is not None
    inputs = [codes, variants.real(rows), *parameters]
    variants.replace(node, n_bits.TABLE, inputs, node.outputs[0], operator.attributes)


def _nearest(weight: Array, spec: QuantSpec) -> GroupedWeight:
    return Quantizer(spec, GroupParameters.ZERO_POINTS).nearest(weight)


def _constants(
    variants: Variants, node: ir.Node, operator: n_bits.Operator
) -> list[ir.Value | None]:
    return [
        variants.shared_constant(f"{node.name}.weight/{part}", values)
        for part, values in operator.constants.items()
    ]
