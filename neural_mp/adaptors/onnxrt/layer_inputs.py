"""Weights of products and tables with the tensors that they read, for noise without gradients."""

from __future__ import annotations

from functools import partial

import numpy as np
import onnx_ir as ir

from neural_mp.adaptors.common.optional import StoredLayer
from neural_mp.adaptors.onnxrt.convert_int8 import matrix_and_bias
from neural_mp.adaptors.onnxrt.fusion import is_table
from neural_mp.adaptors.onnxrt.graph_edit import known_array
from neural_mp.adaptors.onnxrt.model import OnnxModel
from neural_mp.adaptors.onnxrt.ops import is_product
from neural_mp.util.pytree import Array


def layers(model: OnnxModel) -> dict[str, StoredLayer]:
    """Return op → its weight and the tensor that it reads."""
    stored = {}
    for name, node in model.structure.nodes.items():
        if is_table(node):
            stored[name] = StoredLayer(partial(known_array, node.inputs[0]))
        elif name in model.structure.fusion_groups and is_product(node):
            tensor = model.structure.names.get(node.inputs[0]) if node.inputs[0] else None
            weight = node.inputs[1]
            if tensor is not None and weight is not None and weight.const_value is not None:
                stored[name] = StoredLayer(partial(_weight, node), tensor)
    return stored


def _weight(node: ir.Node) -> Array:
    return np.ascontiguousarray(matrix_and_bias(node)[0].T)
