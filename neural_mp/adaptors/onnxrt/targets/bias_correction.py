"""Correction of biases: the mean that a rounded weight adds to each output channel.

Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction", 2019,
section 4.2.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.onnxrt.graph.edit import require_constant_array
from neural_mp.adaptors.onnxrt.targets.quantized_ops import find_constant_bias, find_constant_weight

#: Correction of an op in a plan.
BIAS_CORRECTION = "bias_correction"


def compute_added_mean(node: ir.Node, error: Array, mean: Array | None) -> Array | None:
    """Return the mean that the error of a weight adds to each output channel; None if unknown.

    Args:
        node: a Conv or a Gemm; other ops have no result.
        error: rounded minus float weight, in the shape of the weight.
        mean: the mean of each channel of the input; None if not observed.
    """
    if mean is None or node.domain or bool(node.attributes.get_int("transA", 0)):
        return None
    if node.op_type == "Gemm":
        rows = error if node.attributes.get_int("transB", 0) else error.T
        return rows @ mean if mean.size == rows.shape[1] else None
    if node.op_type != "Conv":
        return None
    groups = node.attributes.get_int("group", 1)
    by_group = error.reshape(groups, len(error) // groups, error.shape[1], -1).sum(3)
    if mean.size != groups * error.shape[1]:
        return None
    return np.einsum("goi,gi->go", by_group, mean.reshape(groups, -1)).ravel()


def corrects_bias(node: ir.Node, means: Mapping[str, Array]) -> bool:
    """Whether the bias of an op can be corrected."""
    weight = find_constant_weight(node)
    if weight is None or find_constant_bias(node) is None:
        return False
    mean = means.get(str(node.inputs[0].name)) if node.inputs[0] is not None else None
    return (
        compute_added_mean(node, np.zeros(require_constant_array(weight).shape), mean) is not None
    )
