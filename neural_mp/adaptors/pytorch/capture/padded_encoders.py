"""Padding of `nn.TransformerEncoder`: captured as in inference without a trace.

In inference, the encoder packs padded batches into nested tensors, and returns zeros in padded
places. torch.export does not trace nested tensors, so that padded places would hold other values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_forward: Any = nn.TransformerEncoder.forward


@contextmanager
def zeroed_padding() -> Iterator[None]:
    """Trace encoders with zeros in padded places, where inference returns zeros."""
    nn.TransformerEncoder.forward = _traced
    try:
        yield
    finally:
        nn.TransformerEncoder.forward = _forward


def _traced(
    encoder: Any,
    src: torch.Tensor,
    mask: torch.Tensor | None = None,
    src_key_padding_mask: torch.Tensor | None = None,
    is_causal: bool | None = None,
) -> Any:
    """Return the outputs of an encoder, with zeros before its last norm where it packs a batch."""
    if mask is not None or src_key_padding_mask is None or not _packs(encoder, src):
        return _forward(encoder, src, mask, src_key_padding_mask, is_causal)
    norm, encoder.norm = encoder.norm, None
    try:
        outputs = _forward(encoder, src, mask, src_key_padding_mask, is_causal)
    finally:
        encoder.norm = norm
    padded = src_key_padding_mask != 0
    if getattr(encoder, "mask_check", True):
        # Only batches with all padding at the end are packed.
        padded = padded & ~(padded[:, :-1] & ~padded[:, 1:]).any()
    outputs = outputs.masked_fill(padded.unsqueeze(-1), 0.0)
    return outputs if norm is None else norm(outputs)


def _packs(encoder: Any, src: torch.Tensor) -> bool:
    """Whether an encoder packs batches with padding at the end; the conditions are torch's."""
    is_fast = torch.backends.mha.get_fastpath_enabled() and not encoder.layers[0].training
    return bool(is_fast and getattr(encoder, "use_nested_tensor", False) and src.dim() == 3)
