"""Attention in bfloat16 as products, where the processor multiplies bfloat16 fast."""

from __future__ import annotations

import math
from functools import cached_property

import torch
from torch.fx import GraphModule, Node
from torch.nn import functional as F

from neural_mp.adaptors.pytorch.kernels.kernel_probes import multiplies_bfloat16_fast

aten = torch.ops.aten

_ATTENTION = aten.scaled_dot_product_attention.default
#: Number of attention weights, in float32, that fit into the cache of a core; and the number below
#: which calls take longer than the products.
_CACHED_WEIGHTS, _FEW_WEIGHTS = 2**18, 2**14


class AttentionMask:
    """A mask as what is added to products, computed once for all layers that share the mask.

    Nothing is computed before a layer asks.

    Attributes:
        given: the mask as torch's attention takes it.
    """

    def __init__(self, given: torch.Tensor) -> None:
        self.given = given

    @cached_property
    def mask_bias(self) -> torch.Tensor | None:
        """The addends, in bfloat16 if the mask says which weights to keep; None if all are 0."""
        is_choice = self.given.dtype is torch.bool
        if bool(self.given.all() if is_choice else not self.given.any()):
            return None
        if not is_choice:
            return self.given
        zero = self.given.new_zeros((), dtype=torch.bfloat16)
        return zero.where(self.given, -math.inf)

    @cached_property
    def empties_rows(self) -> bool:
        """Whether a row has no weight at all."""
        return self.mask_bias is not None and bool(torch.isneginf(self.mask_bias.amax(-1)).any())


def call_products(module: GraphModule) -> None:
    """Run attention in bfloat16 as products where these are fast."""
    masks: dict[Node, Node] = {}
    for node in list(module.graph.nodes):
        if node.target is not _ATTENTION:
            continue
        values = [x.meta.get("val") if isinstance(x, Node) else None for x in node.args[:3]]
        arguments = {**dict(zip(_ARGUMENTS, node.args[3:], strict=False)), **node.kwargs}
        options = {name: arguments[name] for name in _KEPT if name in arguments}
        if (
            any(getattr(value, "dtype", None) is not torch.bfloat16 for value in values)
            or arguments.get("dropout_p")
            or arguments.get("enable_gqa")
            or not multiplies_bfloat16_fast()
        ):
            continue
        mask = options.get("attn_mask")
        if isinstance(mask, Node):
            if mask not in masks:
                with module.graph.inserting_before(node):
                    masks[mask] = module.graph.call_function(AttentionMask, (mask,))
            options["attn_mask"] = masks[mask]
        node.target = attention_in_bfloat16
        node.args, node.kwargs = node.args[:3], options


_KEPT = ("attn_mask", "is_causal", "scale")
_ARGUMENTS = ("attn_mask", "dropout_p", "is_causal")


def attention_in_bfloat16(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: AttentionMask | None = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> torch.Tensor:
    """Run attention in bfloat16 as two products around a softmax, which computes in float32.

    As many heads at a time as have their weights in the cache. Torch's own kernel takes over for
    rows without any weight, which have a result of 0 there, and for causal attention, of which this
    would compute both halves.
    """
    outer, rows, columns = query.shape[:-2], query.shape[-2], key.shape[-2]
    plain = len(outer) == 2 and outer == key.shape[:-2] == value.shape[:-2] and not is_causal
    if (
        not plain
        or math.prod((*outer, rows, columns)) < _FEW_WEIGHTS
        or (attn_mask is not None and attn_mask.empties_rows)
    ):
        mask = None if attn_mask is None else attn_mask.given
        return F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=is_causal, scale=scale
        )
    added = None if attn_mask is None else attn_mask.mask_bias
    factor = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    bias = (query.new_zeros(()) if added is None else added).expand(*outer, rows, columns)
    heads = max(1, _CACHED_WEIGHTS // (rows * columns))
    # Heads lie behind positions, so that a model may join them without a copy.
    result = query.new_empty(outer[0], rows, outer[1], value.shape[-1]).transpose(1, 2)
    for sample in range(outer[0]):
        for first in range(0, outer[1], heads):
            part = sample, slice(first, first + heads)
            products = torch.baddbmm(
                bias[part],
                query[part].contiguous(),
                key[part].contiguous().transpose(1, 2),
                beta=int(added is not None),
                alpha=factor,
            )
            weights = torch.softmax(products, -1)
            result[part] = torch.bmm(weights, value[part].contiguous())
    return result
