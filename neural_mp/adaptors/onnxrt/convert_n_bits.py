"""Conversion of products and tables to weights in groups, see `n_bits`."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.onnxrt import n_bits
from neural_mp.adaptors.onnxrt.convert_int8 import matrix_and_bias
from neural_mp.adaptors.onnxrt.fusion import is_table
from neural_mp.adaptors.onnxrt.graph_edit import known_array
from neural_mp.adaptors.onnxrt.tensor_variants import Variants
from neural_mp.core.quant_spec import QuantSpec


def write_grouped(variants: Variants, node: ir.Node, spec: QuantSpec) -> None:
    """Convert an op whose weight is stored in groups; inputs and outputs stay float."""
    if is_table(node):
        _write_table(variants, node, spec)
    else:
        _write_product(variants, node, spec)


def _write_product(variants: Variants, node: ir.Node, spec: QuantSpec) -> None:
    matrix, bias = matrix_and_bias(node)
    operator = n_bits.product(np.ascontiguousarray(matrix.T), spec)
    data = node.inputs[0]
    assert data is not None
    inputs = [variants.real(data), *_constants(variants, node, operator)]
    if bias is not None:
        # Between are zero points, omitted if symmetric, and the order of the inputs.
        inputs += [None] * (n_bits.BIAS - len(inputs))
        inputs.append(variants.names.constant(f"{node.name}.bias", bias.astype(np.float32)))
    variants.replace(node, n_bits.PRODUCT, inputs, node.outputs[0], operator.attributes)


def _write_table(variants: Variants, node: ir.Node, spec: QuantSpec) -> None:
    operator = n_bits.table(known_array(node.inputs[0]), spec)
    codes, *others = _constants(variants, node, operator)
    rows = node.inputs[1]
    assert rows is not None
    inputs = [codes, variants.real(rows), *others]
    variants.replace(node, n_bits.TABLE, inputs, node.outputs[0], operator.attributes)


def _constants(
    variants: Variants, node: ir.Node, operator: n_bits.Operator
) -> list[ir.Value | None]:
    return [
        variants.names.constant(f"{node.name}.weight/{part}", values)
        for part, values in operator.constants.items()
    ]
