"""Ops of the lowered graph besides oneDNN's own integer kernels."""

from __future__ import annotations

from functools import reduce

import torch
from torch.nn import functional as F

from neural_mp.adaptors.pytorch import qdq_ops as ops

aten = torch.ops.aten

#: Maximum number of rows for which the int8-weight kernel beats a float product.
_FEW_ROWS = 16
#: Block size of that kernel; it reads past the end of weights that are not a multiple.
_BLOCK = 32


def quantize_uint8(x: torch.Tensor, offset: torch.Tensor, inverse_scale: float) -> torch.Tensor:
    """Compute `ops.quantize` with a precomputed tensor `offset`: zero point + ½."""
    return torch.add(offset, x.float(), alpha=inverse_scale).clamp_(0, 255).to(torch.uint8)


def dequantize_uint8(
    q: torch.Tensor, scale: float, zero_point: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Compute `ops.dequantize` with the zero point as a float tensor, which also converts."""
    return torch.sub(q, zero_point).mul_(scale).to(dtype)


def max_pool2d_uint8(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Max-pool uint8 images [batch, channels, height, width], or one image without a batch.

    Pools one axis after the other, as a maximum of slices: torch has no channels-last uint8 max
    pooling, and a detour through int16 costs up to twice as long.
    """
    if ceil_mode:
        pooled = aten.max_pool2d.default(
            x.to(torch.int16), kernel, stride or [], padding or 0, dilation or 1, ceil_mode
        )
        return pooled.to(torch.uint8)
    for axis in (0, 1):
        window, gap = _axis(kernel, axis), _axis(dilation or [1], axis)
        sides, step = _axis(padding or [0], axis), _axis(stride or kernel, axis)
        x = _largest(x, axis - 2, window, step, sides, gap)
    return x


def _axis(values: list[int], axis: int) -> int:
    return values[axis if len(values) > 1 else 0]


def _largest(
    x: torch.Tensor, axis: int, window: int, step: int, sides: int, gap: int
) -> torch.Tensor:
    """Max-pool along axis -2 or -1; zero padding never exceeds a uint8 value."""
    if sides:
        x = F.pad(x, (0, 0, sides, sides) if axis == -2 else (sides, sides))
    count = (x.shape[axis] - gap * (window - 1) - 1) // step + 1
    slices = [
        x.narrow(axis, first, (count - 1) * step + 1) for first in range(0, gap * window, gap)
    ]
    if step > 1:
        slices = [part[..., ::step, :] if axis == -2 else part[..., ::step] for part in slices]
    return reduce(torch.maximum, slices)


def weight_only_linear(
    x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Run a dense layer with int8 weights [outputs, inputs] and one scale per output.

    For few rows, as in token-by-token generation, reading weights dominates: weights are then read
    as int8, and `x` is rounded to bfloat16.
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
    """Return rows of an int8 table [rows, features], one scale per row, as float32."""
    return q[indices].float() * scales[indices].unsqueeze(-1)
