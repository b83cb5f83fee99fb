"""Scales of a simulated graph, learned as one parameter, and the rounding with them.

A net has several scales per layer. As one parameter, they cost the optimizer, the clipping of
gradients and data parallelism one call, and a step reads all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.common.quant_params import QuantParams, weight_scales
from neural_mp.adaptors.common.simulation import moving_range
from neural_mp.adaptors.pytorch.compiler import uncompiled
from neural_mp.adaptors.pytorch.training.fake_quantize import RoundActivation
from neural_mp.adaptors.pytorch.training.weight_rows import (
    RoundWeights,
    StoredRows,
    WeightGroup,
)
from neural_mp.util.pytree import as_numpy


class Scales(nn.Module):
    """Scales of quantized tensors, and of rows of weights.

    Tensors and weights are numbered in their order. Scales that are read together are a part of
    the parameter, as each part costs a call.

    Attributes:
        log_scales: logarithms of the ratios to `initial`.
        initial: scales of quantized tensors, then of rows of weights.
        zero_points: zero points of quantized tensors.
        row_offsets: offsets of rows of weights; empty if no weight has offsets.
        groups: weights that are rounded together.
        sizes: number of scales of each part: of quantized tensors, then of each group.
        observing: whether ranges follow the data, and scales of INT8 weights follow the weights.
    """

    initial: torch.Tensor
    zero_points: torch.Tensor
    row_offsets: torch.Tensor

    def __init__(
        self,
        tensors: Sequence[Sequence[QuantParams]],
        groups: Sequence[Sequence[StoredRows]],
        learned: bool,
    ) -> None:
        super().__init__()
        encodings = [entry for part in tensors for entry in part]
        weights = [entry for group in groups for entry in group]
        self.groups = [WeightGroup.of([entry.form for entry in group]) for group in groups]
        self.tensor_parts = len(tensors)
        self.sizes = [*map(len, tensors), *[group.count for group in self.groups]]
        # Numbers of rows before each part, counted from the first weight.
        self.starts = [
            end - size - len(encodings)
            for end, size in zip(accumulate(self.sizes), self.sizes, strict=True)
        ]
        self.tensors = [_Slot(part, i) for part, n in enumerate(tensors) for i in range(len(n))]
        self.weights = [
            _Slot(part, sum(entry.form.count for entry in group[:member]))
            for part, group in enumerate(groups, len(tensors))
            for member in range(len(group))
        ]
        self.alone = [WeightGroup.of([entry.form]) for entry in weights]
        self.log_scales = nn.Parameter(torch.zeros(sum(self.sizes)), requires_grad=learned)
        scales = torch.tensor([entry.scale for entry in encodings], dtype=torch.float64)
        rows = [entry.scales.reshape(-1).double() for entry in weights]
        self.register_buffer("initial", torch.cat([scales, *rows]))
        points = torch.tensor([entry.zero_point for entry in encodings], dtype=torch.int64)
        self.register_buffer("zero_points", points)
        offsets = [
            torch.zeros(entry.form.count) if entry.offsets is None else entry.offsets.reshape(-1)
            for entry in weights
        ]
        has_offsets = any(entry.form.has_offsets for entry in weights)
        stored = torch.cat(offsets).float() if has_offsets else torch.empty(0)
        self.register_buffer("row_offsets", stored)
        self.observing = False

    def forward(self) -> Rounding:
        """Return the rounding with the current scales."""
        return Rounding(self)

    def encodings(self) -> list[QuantParams]:
        """Return the current scales and zero points of quantized tensors."""
        return [QuantParams(*encoding) for encoding in Rounding(self).encodings]

    def stored(self, number: int) -> StoredRows:
        """Return the current form and numbers of a weight, as they are stored."""
        form = self.alone[number].members[0]
        scales, offsets = Rounding(self).rows_of(number)
        if offsets is None:
            return StoredRows(form, scales.reshape(form.rows))
        parts = (part.reshape(form.rows).bfloat16() for part in (scales, offsets))
        return StoredRows(form, *parts)

    @uncompiled
    def observe_tensor(self, number: int, x: torch.Tensor) -> None:
        """Move a range towards that of a tensor."""
        previous = self.encodings()[number]
        low, high = (end.item() for end in torch.aminmax(x))
        updated = QuantParams.of(moving_range((previous.low, previous.high), (low, high)))
        self.zero_points[number] = updated.zero_point
        self._set(number, torch.tensor([updated.scale], dtype=torch.float64))

    @uncompiled
    def observe_weight(self, number: int, weight: torch.Tensor) -> torch.Tensor:
        """Set the scales of a weight to those of its values, and return them."""
        values, slot = as_numpy(weight.detach()), self.weights[number]
        limit = self.alone[number].limits[1]
        axes = tuple(range(1, values.ndim))
        scales = torch.from_numpy(weight_scales(values, axes, limit)).reshape(-1)
        self._set(len(self.tensors) + self.starts[slot.part] + slot.start, scales)
        return scales

    def _set(self, start: int, scales: torch.Tensor) -> None:
        """Set some scales."""
        self.initial[start : start + len(scales)] = scales
        # Through `data`, as the call in progress holds parts of the parameter.
        self.log_scales.data[start : start + len(scales)] = 0


@dataclass(frozen=True)
class _Slot:
    """Part of the scales, and the place in it."""

    part: int
    start: int


class Rounding:
    """The rounding of one call of a graph, which reads all scales at once.

    Attributes:
        table: the scales.
        is_plain: whether every op must be seen by itself: by the compiler, or to observe ranges.
        logs: parts of `Scales.log_scales`.
        encodings: scale and zero point of each quantized tensor; tensors in compiled code, where
            reading a number would split the graph.
    """

    def __init__(self, table: Scales) -> None:
        self.table = table
        logs, points, count = table.log_scales, table.zero_points, len(table.tensors)
        self.logs = logs.split(table.sizes)
        tensors, rows = (table.initial * logs.detach().exp()).tensor_split((count,))
        self._rows = rows.float()
        compiled = torch.compiler.is_compiling()
        self.is_plain = compiled or table.observing
        self.encodings: list[Any] = list(
            zip(tensors.float().unbind(), points.unbind(), strict=True)
            if compiled
            else zip(tensors.tolist(), points.tolist(), strict=True)
        )

    def tensor(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return a tensor after quantize and dequantize, in float32."""
        x = x.float()
        encoding = self.encodings[number]
        if self.table.observing:
            self.table.observe_tensor(number, x.detach())
            encoding = self.table.initial[number].float(), self.table.zero_points[number]
            if not torch.compiler.is_compiling():
                params = self.table.encodings()[number]
                encoding = params.scale, params.zero_point
        slot = self.table.tensors[number]
        log = self.logs[slot.part]
        if len(log) > 1:
            log = log[slot.start : slot.start + 1]
        rounded: torch.Tensor = RoundActivation.apply(x, log, *encoding)
        return rounded

    def weight(self, weight: torch.Tensor, number: int) -> torch.Tensor:
        """Return a weight after quantize and dequantize."""
        group, slot = self.table.alone[number], self.table.weights[number]
        log = self.logs[slot.part]
        if len(log) > group.count:
            log = log[slot.start : slot.start + group.count]
        scales, offsets = self.rows_of(number)
        if self.table.observing and offsets is None:
            scales = self.table.observe_weight(number, weight).view(group.rows)
        (result,) = RoundWeights.apply(group, log, scales, offsets, weight)
        rounded: torch.Tensor = result
        return rounded

    def rows_of(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scales and offsets of a weight."""
        slot = self.table.weights[number]
        return self.rows_of_part(slot.part, slot.start, self.table.alone[number])

    def rows_of_part(
        self, part: int, start: int, group: WeightGroup
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return scales and offsets from a place of a part, to broadcast with a group's weights."""
        start += self.table.starts[part]
        scales = self._rows.narrow(0, start, group.count).view(group.rows)
        if not group.has_offsets:
            return scales, None
        offsets = self.table.row_offsets.narrow(0, start, group.count).view(group.rows)
        return scales.bfloat16().float(), offsets
