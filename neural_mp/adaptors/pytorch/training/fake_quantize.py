"""Quantize and dequantize in one step, with gradients for values and scales.

Straight-through estimator for values; learned step sizes (Esser et al., "Learned Step Size
Quantization", 2020) for scales. A scale is learned as the logarithm of its ratio to the initial
scale, which keeps it positive and makes the size of a step independent of its unit (Jain et al.,
"Trained Quantization Thresholds", 2020).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.common.quant_params import QuantParams, weight_scales
from neural_mp.adaptors.common.simulation import gradient_factor, moving_range
from neural_mp.adaptors.pytorch import qdq_ops as ops
from neural_mp.util.pytree import as_numpy


def _dot(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Return the inner product of two tensors, without a copy if their memory layouts agree."""
    if first.ndim == 4 and first.is_contiguous(memory_format=torch.channels_last):
        first, second = first.permute(0, 2, 3, 1), second.permute(0, 2, 3, 1)
    return torch.dot(first.reshape(-1), second.reshape(-1))


class _RoundActivation(torch.autograd.Function):
    """uint8 quantize and dequantize of a tensor, computed as `qdq_ops.quantize` does."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, log_scale: torch.Tensor, scale: Any, zero_point: int
    ) -> torch.Tensor:
        """Return the dequantized tensor; `scale` includes `log_scale`."""
        if isinstance(scale, float):
            steps = ops.in_steps(x, scale, zero_point)
        else:
            steps = x * (1 / scale) + (zero_point + 0.5)
        rounded = ops.dequantized(steps.clamp_(0, ops.QMAX).floor_(), scale, zero_point)
        ctx.save_for_backward(x, rounded)
        ctx.scale, ctx.zero_point = scale, zero_point
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients by the tensor, within its range, and by the log of the scale."""
        (grad,), (x, rounded), scale = grads, ctx.saved_tensors, ctx.scale
        offset = ctx.zero_point + 0.5
        if isinstance(scale, float):
            low, high = -offset * scale, (ops.QMAX - offset) * scale
            within = torch.ops.aten.hardtanh_backward(grad, x, low, high)
        else:
            steps = x * (1 / scale) + offset
            within = torch.ops.aten.hardtanh_backward(grad, steps, 0.0, float(ops.QMAX))
        if not ctx.needs_input_grad[1]:
            return within, None, None, None
        # d(rounded)/d(log scale) is rounded − x within the range, and rounded outside.
        found = _dot(grad, rounded).sub_(_dot(within, x))
        return within, found.mul_(gradient_factor(x.numel(), ops.QMAX)), None, None


class _RoundWeight(torch.autograd.Function):
    """Symmetric int8 quantize and dequantize of a weight, a scale per index of the first axis."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, log_scales: torch.Tensor, scales: torch.Tensor, limit: int
    ) -> torch.Tensor:
        """Return the dequantized weight; `scales` include `log_scales`."""
        steps = weight / scales
        rounded = steps.round().clamp_(-limit, limit).mul_(scales)
        ctx.save_for_backward(weight, steps, rounded)
        ctx.limit = limit
        return rounded

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients by the weight, within its range, and by the logs of the scales."""
        (grad,), (weight, steps, rounded) = grads, ctx.saved_tensors
        edge = ctx.limit + 0.5
        within = torch.ops.aten.hardtanh_backward(grad, steps, -edge, edge)
        if not ctx.needs_input_grad[1]:
            return within, None, None, None
        # One product of all values and one sum: fewer calls than inner products row by row.
        products = (grad * rounded).addcmul_(within, weight, value=-1)
        found = products.sum(dim=tuple(range(1, weight.ndim)))
        factor = gradient_factor(weight.numel() // len(weight), ctx.limit)
        return within, found.mul_(factor), None, None


class FakeQuantizer(nn.Module):
    """The quantization of a tensor to uint8, or of tensors with a common scale.

    Attributes:
        observing: whether the range follows the data.
    """

    initial: torch.Tensor
    zero_point: torch.Tensor

    def __init__(self, encoding: QuantParams, learned: bool) -> None:
        super().__init__()
        self.log_scale = nn.Parameter(torch.zeros(()), requires_grad=learned)
        self.register_buffer("initial", torch.tensor(encoding.scale, dtype=torch.float64))
        self.register_buffer("zero_point", torch.tensor(encoding.zero_point))
        self.observing = False

    @property
    def encoding(self) -> QuantParams:
        """The current scale and zero point."""
        scale = self.initial.item() * math.exp(self.log_scale.item())
        return QuantParams(scale, int(self.zero_point.item()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensor after quantize and dequantize, in float32."""
        x = x.float()
        if self.observing:
            self._observe(x.detach())
        if torch.compiler.is_compiling():
            # Reading a number would split the compiled graph.
            scale: Any = self.initial.float() * self.log_scale.detach().exp()
            found = _RoundActivation.apply(x, self.log_scale, scale, self.zero_point)
        else:
            known = self.encoding
            found = _RoundActivation.apply(x, self.log_scale, known.scale, known.zero_point)
        rounded: torch.Tensor = found
        return rounded

    @torch.compiler.disable
    def _observe(self, x: torch.Tensor) -> None:
        known = self.encoding
        low, high = (end.item() for end in torch.aminmax(x))
        found = QuantParams.of(moving_range((known.low, known.high), (low, high)))
        self.initial.fill_(found.scale)
        self.zero_point.fill_(found.zero_point)
        with torch.no_grad():
            self.log_scale.zero_()


class FakeWeight(nn.Module):
    """The quantization of a weight to int8.

    Attributes:
        observing: whether the scales follow the weight.
        limit: the largest integer.
    """

    initial: torch.Tensor

    def __init__(self, scales: torch.Tensor, limit: int, learned: bool) -> None:
        super().__init__()
        self.log_scales = nn.Parameter(torch.zeros_like(scales), requires_grad=learned)
        self.register_buffer("initial", scales.clone())
        self.observing, self.limit = False, limit

    @property
    def scales(self) -> torch.Tensor:
        """The current scales, one per output channel."""
        return self.initial * self.log_scales.detach().exp()

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight after quantize and dequantize."""
        if self.observing:
            self._observe(weight.detach())
        scales = self.scales.view(-1, *[1] * (weight.ndim - 1))
        found: torch.Tensor = _RoundWeight.apply(weight, self.log_scales, scales, self.limit)
        return found

    def integers(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight as int8."""
        scales = self.scales.reshape(-1, *[1] * (weight.ndim - 1))
        steps = (weight.detach() / scales).round().clamp_(-self.limit, self.limit)
        return steps.to(torch.int8)

    @torch.compiler.disable
    def _observe(self, weight: torch.Tensor) -> None:
        values = as_numpy(weight)
        found = weight_scales(values, tuple(range(1, values.ndim)), self.limit)
        self.initial.copy_(torch.from_numpy(found.reshape(-1)))
        with torch.no_grad():
            self.log_scales.zero_()


class _RoundGroups(torch.autograd.Function):
    """Quantize and dequantize of a weight in groups; the scales stay as they are."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int
    ) -> torch.Tensor:
        """Return the dequantized weight."""
        codes, steps = group_codes(weight, scales, offsets, bits)
        ctx.save_for_backward(steps)
        ctx.bits = bits
        middle = ops.middle_code(bits)
        return codes.sub_(middle).mul_(scales[..., None]).add_(offsets[..., None]).flatten(-2)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient by the weight within the range of its group."""
        (grad,), (steps,) = grads, ctx.saved_tensors
        within = torch.ops.aten.hardtanh_backward(
            grad.reshape(steps.shape), steps, -0.5, ops.max_code(ctx.bits) + 0.5
        )
        return within.reshape(grad.shape), None, None, None


def group_codes(
    weight: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the codes of a weight in groups as floats, and the codes before rounding."""
    grouped = weight.unflatten(-1, (scales.shape[-1], -1))
    steps = (grouped - offsets[..., None]) / scales[..., None] + ops.middle_code(bits)
    return steps.round().clamp_(0, ops.max_code(bits)), steps


class FakeGroups(nn.Module):
    """The quantization of a weight to 4 bits or less, with scales and offsets in bfloat16."""

    scales: torch.Tensor
    offsets: torch.Tensor

    def __init__(self, scales: torch.Tensor, offsets: torch.Tensor, bits: int) -> None:
        super().__init__()
        self.register_buffer("scales", scales.float())
        self.register_buffer("offsets", offsets.float())
        self.bits = bits

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the weight after quantize and dequantize."""
        found: torch.Tensor = _RoundGroups.apply(weight, self.scales, self.offsets, self.bits)
        return found

    def codes(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the codes [outputs, inputs] as uint8."""
        codes, _ = group_codes(weight.detach(), self.scales, self.offsets, self.bits)
        return codes.flatten(-2).to(torch.uint8)


class _RoundDynamically(torch.autograd.Function):
    """uint8 quantize and dequantize over the range of each call."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        """Return the dequantized tensor."""
        q, scale, zero_point = ops.quantize_dynamic(x)
        found: torch.Tensor = ops.dequantize_dynamic(q, scale, zero_point, x.dtype)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradient unchanged: no value is clipped."""
        return grads[0]


def round_dynamically(x: torch.Tensor) -> torch.Tensor:
    """Return a tensor after quantize and dequantize over its own range."""
    found: torch.Tensor = _RoundDynamically.apply(x)
    return found
