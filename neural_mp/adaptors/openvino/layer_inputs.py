"""Weights of products and tables with the tensors that they read, for noise without gradients."""

from __future__ import annotations

from functools import partial
from typing import Any

from neural_mp.adaptors.common.optional import StoredLayer
from neural_mp.adaptors.openvino.graph_edit import source_of, tensor_of
from neural_mp.adaptors.openvino.low_bits import is_table, matrix_of
from neural_mp.adaptors.openvino.model import OpenVinoModel
from neural_mp.adaptors.openvino.ops import Role, role_of


def layers(model: OpenVinoModel) -> dict[str, StoredLayer]:
    """Return op → its weight and the tensor that it reads."""
    structure = model.structure
    return {
        name: StoredLayer(partial(matrix_of, node), _read(node))
        for name, node in structure.nodes.items()
        if is_table(node) or (name in structure.fusion_groups and role_of(node) is Role.PRODUCT)
    }


def _read(node: Any) -> str | None:
    return None if is_table(node) else tensor_of(source_of(node, 0))
