"""Quantize and dequantize in one step, with gradients for values and scales.

Straight-through estimator for values; learned step sizes (Esser et al., "Learned Step Size
Quantization", 2020) for scales. A scale is learned as the logarithm of its ratio to the initial
scale, which keeps it positive and makes the size of a step independent of its unit (Jain et al.,
"Trained Quantization Thresholds", 2020). A row of values with one scale is an output channel of a
weight in INT8, and a group of inputs in 4 bits or less.

A step of a small net is mostly the calls of its ops, so every call here is one that counts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from neural_mp.adaptors.common.simulation import lsq_gradient_factor
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops

hardtanh_backward = torch.ops.aten.hardtanh_backward.default
#: Number of values below which one product of two passes takes longer for its calls than its work.
_FEW = 1 << 15


def _compute_inner_product(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the inner product of two tensors, without a copy if their memory layouts agree."""
    if first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last):
        first, second = first.permute(0, 2, 3, 1), second.permute(0, 2, 3, 1)
    return torch.dot(first.reshape(-1), second.reshape(-1))


def fake_quantize_tensor(x: torch.Tensor, scale: Any, zero_point: Any) -> torch.Tensor:
    """Return a tensor after quantize and dequantize, computed as `qdq_ops.quantize` does."""
    if isinstance(scale, float):
        steps = ops.in_steps(x, scale, zero_point)
    else:
        steps = x * (1 / scale) + (zero_point + 0.5)
    return ops.dequantize_integers(steps.clamp_(0, ops.QMAX).floor_(), scale, zero_point)


def clip_gradient_to_range(
    grad: torch.Tensor, x: torch.Tensor, scale: Any, zero_point: Any
) -> torch.Tensor:
    """Return the gradient of `fake_quantize_tensor` by the tensor: 0 outside of its range."""
    offset = zero_point + 0.5
    if isinstance(scale, float):
        return hardtanh_backward(grad, x, -offset * scale, (ops.QMAX - offset) * scale)
    return hardtanh_backward(grad, x * (1 / scale) + offset, 0.0, float(ops.QMAX))


class RoundActivation(torch.autograd.Function):
    """uint8 quantize and dequantize of a tensor, with learned scale."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, log_scale: torch.Tensor, scale: Any, zero_point: Any
    ) -> torch.Tensor:
        """Return the dequantized tensor; `scale` includes `log_scale`, a vector of one number."""
        rounded = fake_quantize_tensor(x, scale, zero_point)
        ctx.save_for_backward(x, rounded)
        ctx.scale, ctx.zero_point = scale, zero_point
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients by the tensor, within its range, and by the log of the scale."""
        (grad,), (x, rounded) = grads, ctx.saved_tensors
        within = clip_gradient_to_range(grad, x, ctx.scale, ctx.zero_point)
        if not ctx.needs_input_grad[1]:
            return within, None, None, None
        # d(rounded)/d(log scale) is rounded − x within the range, and rounded outside.
        if x.numel() < _FEW:
            by_log = (grad * rounded).addcmul_(within, x, value=-1).sum()
        else:
            by_log = _compute_inner_product(grad, rounded).sub_(_compute_inner_product(within, x))
        by_log = by_log.mul_(lsq_gradient_factor(x.numel(), ops.QMAX))
        return within, by_log.view(1), None, None


class _RoundDynamically(torch.autograd.Function):
    """uint8 quantize and dequantize over the range of each call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        q, scale, zero_point = ops.quantize_dynamic(x)
        return ops.dequantize_dynamic(q, scale, zero_point, x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient unchanged: no value is clipped."""
        return grads[0]


def round_dynamically(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor after quantize and dequantize over its own range."""
    return _RoundDynamically.apply(x)


@dataclass(frozen=True)
class RowFormat:
    """Form of a stored weight.

    Attributes:
        shape: the shape of the weight.
        rows: the shape of its scales: [outputs], or [outputs, groups].
        limits: the smallest and the largest integer.
        has_offsets: whether rows have offsets, too; offsets and scales are in bfloat16 then.
    """

    shape: tuple[int, ...]
    rows: tuple[int, ...]
    limits: tuple[int, int]
    has_offsets: bool

    @classmethod
    def per_channel(cls, shape: Sequence[int], limit: int) -> RowFormat:
        """Return the form of an INT8 weight with a scale per output channel."""
        return cls(tuple(shape), (shape[0],), (-limit, limit), False)

    @classmethod
    def per_group(cls, shape: Sequence[int], groups: int, bits: int) -> RowFormat:
        """Return the form of a weight of 4 bits or less with a scale per group of inputs."""
        middle = ops.middle_code(bits)
        limits = -middle, ops.max_code(bits) - middle
        return cls(tuple(shape), (*shape[:-1], groups), limits, True)

    @property
    def bits(self) -> int:
        """Number of bits of an integer."""
        low, high = self.limits
        return (high - low).bit_length()

    @cached_property
    def row_count(self) -> int:
        """Number of rows."""
        return torch.Size(self.rows).numel()

    @property
    def row_width(self) -> int:
        """Number of values of a row."""
        return torch.Size(self.shape).numel() // self.row_count

    @cached_property
    def by_rows(self) -> tuple[int, ...]:
        """Shape of a weight that broadcasts with one number per row, in the shape `per_row`."""
        return (*self.rows, self.row_width) if self.has_offsets else self.shape

    @cached_property
    def per_row(self) -> tuple[int, ...]:
        """Shape of one number per row."""
        return (*self.rows, *[1] * (len(self.by_rows) - len(self.rows)))

    @cached_property
    def gradient_factor(self) -> float:
        """LSQ's factor of the gradients of scales."""
        return lsq_gradient_factor(self.row_width, self.limits[1])


@dataclass(frozen=True)
class StoredRows:
    """Form and numbers of a stored weight; offsets only if the form has them."""

    form: RowFormat
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def to_integers(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight in integers, as floats."""
        return self._round_rows(weight)[0].view(weight.shape)

    def fake_quantize(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight after quantize and dequantize."""
        integers, scales, offsets = self._round_rows(weight)
        dequantized = integers.mul_(scales)
        return (dequantized if offsets is None else dequantized.add_(offsets)).view(weight.shape)

    def _round_rows(
        self, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        shape = self.form.per_row
        scales = self.scales.float().view(shape)
        offsets = None if self.offsets is None else self.offsets.float().view(shape)
        values = weight.reshape(self.form.by_rows)
        return _round_to_steps(values, scales, offsets, self.form.limits)[1], scales, offsets


class RoundWeight(torch.autograd.Function):
    """The rounding of a weight, with learned scales."""

    @staticmethod
    def forward(
        ctx: Any,
        form: RowFormat,
        weight: torch.Tensor,
        log_scales: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
    ) -> torch.Tensor:
        """Return the dequantized weight; `scales` include `log_scales`."""
        values = weight.reshape(form.by_rows)
        steps, integers = _round_to_steps(values, scales, offsets, form.limits)
        if offsets is None:  # keeps no tensor that others do not keep, too
            rounded = integers.mul_(scales)
            ctx.save_for_backward(steps, values, rounded, None)
        else:
            rounded = (integers * scales).add_(offsets)
            ctx.save_for_backward(steps, steps, integers, scales)
        ctx.form = form
        return rounded if rounded.shape == form.shape else rounded.view(form.shape)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients by the weight, within its range, and by the logs of scales."""
        form, (steps, values, rounded, scales) = ctx.form, ctx.saved_tensors
        low, high = form.limits
        grad = grads[0].reshape(form.by_rows)
        within = hardtanh_backward(grad, steps, low - 0.5, high + 0.5)
        by_weight = within.view(form.shape)
        if not ctx.needs_input_grad[2]:
            return None, by_weight, None, None, None
        # One product of all values and one sum: fewer calls than inner products row by row.
        sums = (grad * rounded).addcmul_(within, values, value=-1).sum_to_size(form.per_row)
        by_logs = (sums if scales is None else sums.mul(scales)).mul(form.gradient_factor).view(-1)
        return None, by_weight, by_logs, None, None


def _round_to_steps(
    values: torch.Tensor,
    scales: torch.Tensor,
    offsets: torch.Tensor | None,
    limits: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in steps of their scales, and rounded to integers within limits."""
    steps = (values if offsets is None else values - offsets) / scales
    return steps, steps.round().clamp_(*limits)
