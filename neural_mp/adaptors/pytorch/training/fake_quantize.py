"""Quantize and dequantize in one step, with gradients for values and scales.

Straight-through estimator for values; learned step sizes (Esser et al., "Learned Step Size
Quantization", 2020) for scales. A scale is learned as the logarithm of its ratio to the initial
scale, which keeps it positive and makes the size of a step independent of its unit (Jain et al.,
"Trained Quantization Thresholds", 2020).

A step of a small net is mostly the calls of its ops, so every call here is one that counts.
"""

from __future__ import annotations

from typing import Any

import torch

from neural_mp.adaptors.common.simulation import gradient_factor
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops

hardtanh_backward = torch.ops.aten.hardtanh_backward.default
#: Number of values below which one product of two passes takes longer for its calls than its work.
_FEW = 1 << 15


def _inner_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the inner product of two tensors, without a copy if their memory layouts agree."""
    if first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last):
        first, second = first.permute(0, 2, 3, 1), second.permute(0, 2, 3, 1)
    return torch.dot(first.reshape(-1), second.reshape(-1))


def rounded_tensor(x: torch.Tensor, scale: Any, zero_point: Any) -> torch.Tensor:
    """Return a tensor after quantize and dequantize, computed as `qdq_ops.quantize` does."""
    if isinstance(scale, float):
        steps = ops.in_steps(x, scale, zero_point)
    else:
        steps = x * (1 / scale) + (zero_point + 0.5)
    return ops.dequantized(steps.clamp_(0, ops.QMAX).floor_(), scale, zero_point)


def gradient_within(
    grad: torch.Tensor, x: torch.Tensor, scale: Any, zero_point: Any
) -> torch.Tensor:
    """Return the gradient of `rounded_tensor` by the tensor: 0 outside of its range."""
    offset = zero_point + 0.5
    if isinstance(scale, float):
        return hardtanh_backward(grad, x, -offset * scale, (ops.QMAX - offset) * scale)
    return hardtanh_backward(grad, x * (1 / scale) + offset, 0.0, float(ops.QMAX))


def gradient_by_log(
    grad: torch.Tensor, within: torch.Tensor, x: torch.Tensor, rounded: torch.Tensor
) -> torch.Tensor:
    """Return the gradient of `rounded_tensor` by the log of its scale, without LSQ's factor."""
    # d(rounded)/d(log scale) is rounded − x within the range, and rounded outside.
    if x.numel() < _FEW:
        return (grad * rounded).addcmul_(within, x, value=-1).sum()
    return _inner_product(grad, rounded).sub_(_inner_product(within, x))


class RoundActivation(torch.autograd.Function):
    """uint8 quantize and dequantize of a tensor, with learned scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, log_scale: torch.Tensor, scale: Any, zero_point: Any
    ) -> torch.Tensor:
        """Return the dequantized tensor; `scale` includes `log_scale`, a vector of one number."""
        rounded = rounded_tensor(x, scale, zero_point)
        ctx.save_for_backward(x, rounded)
        ctx.scale, ctx.zero_point = scale, zero_point
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients by the tensor, within its range, and by the log of the scale."""
        (grad,), (x, rounded) = grads, ctx.saved_tensors
        within = gradient_within(grad, x, ctx.scale, ctx.zero_point)
        if not ctx.needs_input_grad[1]:
            return within, None, None, None
        by_log = gradient_by_log(grad, within, x, rounded).mul_(
            gradient_factor(x.numel(), ops.QMAX)
        )
        return within, by_log.view(1), None, None


class _RoundDynamically(torch.autograd.Function):
    """uint8 quantize and dequantize over the range of each call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the dequantized tensor."""
        q, scale, zero_point = ops.quantize_dynamic(x)
        result: torch.Tensor = ops.dequantize_dynamic(q, scale, zero_point, x.dtype)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient unchanged: no value is clipped."""
        return grads[0]


def round_dynamically(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor after quantize and dequantize over its own range."""
    result: torch.Tensor = _RoundDynamically.apply(x)
    return result
