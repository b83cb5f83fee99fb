"""What the lowered graph calls besides oneDNN's own integer kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from neural_mp.adaptors.pytorch import ops

aten = torch.ops.aten

#: Up to so many rows the kernel that reads int8 weights beats a product with weights made float.
_FEW_ROWS = 16
#: That kernel reads its weights in blocks of so many and past their end where that does not divide.
_BLOCK = 32


def quantize_uint8(x: torch.Tensor, offset: torch.Tensor, inverse_scale: float) -> torch.Tensor:
    """`ops.quantize`, with its offset, zero point + ½, as a tensor made once."""
    return torch.add(offset, x.float(), alpha=inverse_scale).clamp_(0, 255).to(torch.uint8)


def dequantize_uint8(
    q: torch.Tensor, scale: float, zero_point: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """`ops.dequantize`, with its zero point as a float tensor, which also converts."""
    return torch.sub(q, zero_point).mul_(scale).to(dtype)


def max_pool2d_uint8(x: torch.Tensor, *arguments: Any) -> torch.Tensor:
    """Max pooling of uint8 values.

    By way of int16: torch has no channels-last max pooling for uint8.
    """
    return aten.max_pool2d.default(x.to(torch.int16), *arguments).to(torch.uint8)


def weight_only_linear(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """A dense layer with int8 weights [outputs, inputs] and one scale an output.

    Few rows, as when a text is generated word by word, are bound by reading the weights: there
    they are read as int8, with `x` rounded to bfloat16.
    """
    features = x.shape[-1]
    if features % _BLOCK or x.numel() > _FEW_ROWS * features or not x.numel():
        return F.linear(x, ops.dequantize_weight(q, scales).to(x.dtype), bias)
    rows = x.reshape(-1, features).to(torch.bfloat16)
    result = aten._weight_int8pack_mm(rows, q, scales.to(torch.bfloat16)).to(x.dtype)
    result = result.reshape(*x.shape[:-1], len(q))
    return result if bias is None else result + bias


def weight_only_embedding(
    q: torch.Tensor, scales: torch.Tensor, indices: torch.Tensor
) -> torch.Tensor:
    """Rows of an int8 table [rows, features] with one scale a row, as float32."""
    return q[indices].float() * scales[indices].unsqueeze(-1)
