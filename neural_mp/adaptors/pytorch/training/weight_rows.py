"""Quantize and dequantize of weights whose rows of values have a scale each.

A row is an output channel of a weight in INT8, and a group of inputs in 4 bits or less. Small
weights with equal rows are rounded together, as their calls take longer than their work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from neural_mp.adaptors.common.simulation import gradient_factor
from neural_mp.adaptors.pytorch.graph import qdq_ops as ops
from neural_mp.adaptors.pytorch.training.fake_quantize import hardtanh_backward

#: Largest number of values of a weight that is rounded together with others: beyond, the copies
#: take longer than the calls that they save.
_SMALL = 1 << 14
#: Number of tensors that the gradients of a group of weights read.
SAVED = 4


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
    def channels(cls, shape: Sequence[int], limit: int) -> RowFormat:
        """Return the form of an INT8 weight with a scale per output channel."""
        return cls(tuple(shape), (shape[0],), (-limit, limit), False)

    @classmethod
    def groups(cls, shape: Sequence[int], groups: int, bits: int) -> RowFormat:
        """Return the form of a weight of 4 bits or less with a scale per group of inputs."""
        middle = ops.middle_code(bits)
        limits = -middle, ops.max_code(bits) - middle
        return cls(tuple(shape), (*shape[:-1], groups), limits, True)

    @property
    def bits(self) -> int:
        """Number of bits of an integer."""
        low, high = self.limits
        return (high - low).bit_length()

    @property
    def count(self) -> int:
        """Number of rows."""
        return torch.Size(self.rows).numel()

    @property
    def width(self) -> int:
        """Number of values of a row."""
        return torch.Size(self.shape).numel() // self.count

    @property
    def is_small(self) -> bool:
        """Whether calls take longer than the work."""
        return self.count * self.width <= _SMALL

    @property
    def likes(self) -> tuple[Any, ...]:
        """Property that weights which are rounded together have in common."""
        return self.limits, self.width, self.has_offsets


@dataclass(frozen=True)
class StoredRows:
    """Form and numbers of a stored weight; offsets only if the form has them."""

    form: RowFormat
    scales: torch.Tensor
    offsets: torch.Tensor | None = None

    def integers(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight in integers, as floats."""
        return self._rounded(weight)[0].view(weight.shape)

    def rounded(self, weight: torch.Tensor) -> torch.Tensor:
        """Return a weight after quantize and dequantize."""
        integers, scales, offsets = self._rounded(weight)
        dequantized = integers.mul_(scales)
        return (dequantized if offsets is None else dequantized.add_(offsets)).view(weight.shape)

    def _rounded(self, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        group = WeightGroup.of([self.form])
        scales, offsets = (
            None if part is None else part.float().view(group.rows)
            for part in (self.scales, self.offsets)
        )
        values = weight.reshape(group.shape)
        return _in_steps(values, scales, offsets, self.form.limits)[1], scales, offsets


@dataclass(frozen=True)
class WeightGroup:
    """Weights that are rounded together.

    Attributes:
        members: the form of each weight.
        limits: the smallest and the largest integer.
        has_offsets: whether rows have offsets.
        shape: shape of all weights in one tensor.
        rows: shape of one number per row that broadcasts with it.
        counts: number of rows of each weight; empty for a single one.
        factor: factor of the gradients of scales.
        count: number of rows of all weights.
    """

    members: tuple[RowFormat, ...]
    limits: tuple[int, int]
    has_offsets: bool
    shape: tuple[int, ...]
    rows: tuple[int, ...]
    counts: tuple[int, ...]
    factor: float
    count: int

    @classmethod
    def of(cls, members: Sequence[RowFormat]) -> WeightGroup:
        """Return a group of weights whose rows are alike."""
        first = members[0]
        factor = gradient_factor(first.width, first.limits[1])
        fixed = tuple(members), first.limits, first.has_offsets
        if len(members) > 1:
            counts = tuple(member.count for member in members)
            count = sum(counts)
            return cls(*fixed, (count, first.width), (count, 1), counts, factor, count)
        shape = (*first.rows, first.width) if first.has_offsets else first.shape
        rows = (*first.rows, *[1] * (len(shape) - len(first.rows)))
        return cls(*fixed, shape, rows, (), factor, first.count)

    def round(
        self, weights: Sequence[torch.Tensor], scales: torch.Tensor, offsets: torch.Tensor | None
    ) -> tuple[list[torch.Tensor], tuple[torch.Tensor | None, ...]]:
        """Return the dequantized weights, and what `gradients` reads."""
        values = self._joined(weights)
        steps, integers = _in_steps(values, scales, offsets, self.limits)
        if offsets is None:  # keeps no tensor that others do not keep, too
            rounded = integers.mul_(scales)
            return self._parted(rounded), (steps, values, rounded, None)
        rounded = (integers * scales).add_(offsets)
        return self._parted(rounded), (steps, steps, integers, scales)

    def gradients(
        self,
        grads: Sequence[torch.Tensor],
        saved: Sequence[torch.Tensor],
        wants_logs: bool,
    ) -> tuple[torch.Tensor | None, list[torch.Tensor]]:
        """Return the gradients by the logs of scales, and by the weights, within their ranges."""
        steps, values, rounded, scales = saved
        low, high = self.limits
        grad = self._joined(grads)
        within = hardtanh_backward(grad, steps, low - 0.5, high + 0.5)
        if not wants_logs:
            return None, self._parted(within)
        # One product of all values and one sum: fewer calls than inner products row by row.
        products = (grad * rounded).addcmul_(within, values, value=-1)
        sums = products.sum_to_size(self.rows)
        by_logs = (sums if scales is None else sums.mul(scales)).mul(self.factor).view(-1)
        return by_logs, self._parted(within)

    def _joined(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return weights in one tensor."""
        if not self.counts:
            return weights[0] if weights[0].shape == self.shape else weights[0].reshape(self.shape)
        width = (self.shape[1],)
        return torch.cat([w if w.shape[1:] == width else w.reshape(-1, *width) for w in weights])

    def _parted(self, values: torch.Tensor) -> list[torch.Tensor]:
        """Return the weights of a result of `_joined`."""
        parts = values.split(self.counts) if self.counts else (values,)
        return [
            part if part.shape == form.shape else part.view(form.shape)
            for part, form in zip(parts, self.members, strict=True)
        ]


class RoundWeights(torch.autograd.Function):
    """The rounding of a group of weights, with learned scales."""

    @staticmethod
    def forward(
        ctx: Any,
        group: WeightGroup,
        log_scales: torch.Tensor,
        scales: torch.Tensor,
        offsets: torch.Tensor | None,
        *weights: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Return the dequantized weights; `scales` include `log_scales`."""
        rounded, saved = group.round(weights, scales, offsets)
        ctx.save_for_backward(*saved)
        ctx.group = group
        return tuple(rounded)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Return the gradients by the logs of scales and the weights."""
        by_logs, parts = ctx.group.gradients(grads, ctx.saved_tensors, ctx.needs_input_grad[1])
        return None, by_logs, None, None, *parts


def grouped(forms: Sequence[RowFormat]) -> list[list[int]]:
    """Return the places of weights that are rounded together: small ones with equal rows."""
    groups: dict[object, list[int]] = {}
    for index, form in enumerate(forms):
        groups.setdefault(form.likes if form.is_small else index, []).append(index)
    return list(groups.values())


def _in_steps(
    values: torch.Tensor,
    scales: Any,
    offsets: torch.Tensor | None,
    limits: tuple[int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values in steps of their scales, and rounded to integers within limits."""
    steps = (values if offsets is None else values - offsets) / scales
    return steps, steps.round().clamp_(*limits)
