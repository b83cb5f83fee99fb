"""Products of rows that are sorted by expert with the matrices of their experts."""

from __future__ import annotations

import torch
from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.graph.qdq_ops import registered

#: Op of `transformers` with the same arguments, which files can only hold with its package.
_OF_TRANSFORMERS = "transformers::grouped_mm_fallback"


def _grouped_product(
    rows: torch.Tensor, matrices: torch.Tensor, ends: torch.Tensor
) -> torch.Tensor:
    product = rows.new_zeros(rows.shape[0], matrices.shape[2])
    start = 0
    for matrix, end in zip(matrices, ends.tolist(), strict=True):
        if start < end:
            torch.mm(rows[start:end], matrix, out=product[start:end])
            start = end
    return product


#: Rows [rows, inputs] sorted by expert, matrices [experts, inputs, outputs], and the end of the
#: rows of each expert [experts] to products [rows, outputs]; rows after the last end are zero.
grouped_product = registered(
    "grouped_product(Tensor rows, Tensor matrices, Tensor ends) -> Tensor",
    _grouped_product,
    lambda rows, matrices, ends: rows.new_empty(rows.shape[0], matrices.shape[2]),
)


def use_own_products(module: GraphModule) -> None:
    """Replace the op of `transformers` in place, so that a saved graph needs no other package."""
    for node in module.graph.nodes:
        if getattr(node.target, "_name", "") == _OF_TRANSFORMERS:
            node.target = grouped_product
