"""What the lowered graph calls besides oneDNN's own integer kernels."""

from __future__ import annotations

import torch
from torch.nn import functional as F

from neural_mp.adaptors.pytorch import qdq_ops as ops

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


def max_pool2d_uint8(
    x: torch.Tensor,
    kernel: list[int],
    stride: list[int] | None = None,
    padding: list[int] | None = None,
    dilation: list[int] | None = None,
    ceil_mode: bool = False,
) -> torch.Tensor:
    """Max pooling of uint8 images [batch, channels, height, width], or of one without a batch.

    One axis after the other, as the largest of slices: torch has no channels-last max pooling for
    uint8, and going by way of int16 takes up to twice as long.
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
    """Max pooling along -2 or -1; no uint8 value is below the zero it is padded with."""
    if sides:
        x = F.pad(x, (0, 0, sides, sides) if axis == -2 else (sides, sides))
    count = (x.shape[axis] - gap * (window - 1) - 1) // step + 1
    slices = [
        x.narrow(axis, first, (count - 1) * step + 1) for first in range(0, gap * window, gap)
    ]
    if step > 1:
        slices = [part[..., ::step, :] if axis == -2 else part[..., ::step] for part in slices]
    result = slices[0]
    for part in slices[1:]:
        result = torch.maximum(result, part)
    return result


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
