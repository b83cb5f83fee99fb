"""Scales of a simulated graph, learned as one parameter, and the rounding with them.

A net has several scales per layer. As one parameter, they cost the optimizer, the clipping of
gradients and data parallelism one call, and a step reads all of them at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.common.quant_params import QuantParams, weight_scales
from neural_mp.adaptors.common.simulation import update_moving_range
from neural_mp.adaptors.pytorch.training.fake_quantize import (
    RoundActivation,
    RoundWeight,
    StoredRows,
)
from neural_mp.adaptors.pytorch.versions import disable_compilation
from neural_mp.util.pytree import convert_to_numpy


class Scales(nn.Module):
    """Scales of quantized tensors, and of rows of weights, each numbered in its order.

    Attributes:
        log_scales: logarithms of the ratios to `initial`.
        initial: scales of quantized tensors, then of rows of weights.
        zero_points: zero points of quantized tensors.
        row_offsets: offsets of rows of weights; empty if no weight has offsets.
        forms: form of each weight.
        starts: number of rows before each weight.
        sizes: number of scales of each tensor, then of each weight.
        observing: whether ranges follow the data, and scales of INT8 weights follow the weights.
    """

    initial: torch.Tensor
    zero_points: torch.Tensor
    row_offsets: torch.Tensor

    def __init__(
        self, tensors: Sequence[QuantParams], weights: Sequence[StoredRows], learned: bool
    ) -> None:
        super().__init__()
        self.forms = [entry.form for entry in weights]
        counts = [form.row_count for form in self.forms]
        self.starts = [0, *accumulate(counts)][:-1]
        self.sizes = [*[1] * len(tensors), *counts]
        self.log_scales = nn.Parameter(torch.zeros(sum(self.sizes)), requires_grad=learned)
        scales = torch.tensor([entry.scale for entry in tensors], dtype=torch.float64)
        rows = [entry.scales.reshape(-1).double() for entry in weights]
        self.register_buffer("initial", torch.cat([scales, *rows]))
        points = torch.tensor([entry.zero_point for entry in tensors], dtype=torch.int64)
        self.register_buffer("zero_points", points)
        offsets = [
            torch.zeros(entry.form.row_count)
            if entry.offsets is None
            else entry.offsets.reshape(-1)
            for entry in weights
        ]
        has_offsets = any(form.has_offsets for form in self.forms)
        stored = torch.cat(offsets).float() if has_offsets else torch.empty(0)
        self.register_buffer("row_offsets", stored)
        self.observing = False

    def forward(self) -> Rounding:
        """Return the rounding with the current scales."""
        return Rounding(self)

    def quant_params(self) -> list[QuantParams]:
        """Return the current scales and zero points of quantized tensors."""
        return [QuantParams(*encoding) for encoding in Rounding(self).encodings]

    def stored_rows(self, number: int) -> StoredRows:
        """Return the current form and numbers of a weight, as they are stored."""
        form = self.forms[number]
        scales, offsets = Rounding(self).get_row_parameters(number)
        if offsets is None:
            return StoredRows(form, scales.reshape(form.rows))
        parts = (part.reshape(form.rows).bfloat16() for part in (scales, offsets))
        return StoredRows(form, *parts)

    @disable_compilation
    def observe_tensor(self, number: int, x: torch.Tensor) -> None:
        """Move a range towards that of a tensor."""
        previous = self.quant_params()[number]
        low, high = (end.item() for end in torch.aminmax(x))
        updated = QuantParams.of(update_moving_range((previous.low, previous.high), (low, high)))
        self.zero_points[number] = updated.zero_point
        self._set_scales(number, torch.tensor([updated.scale], dtype=torch.float64))

    @disable_compilation
    def observe_weight(self, number: int, weight: torch.Tensor) -> torch.Tensor:
        """Set the scales of a weight to those of its values, and return them."""
        values, limit = convert_to_numpy(weight.detach()), self.forms[number].limits[1]
        axes = tuple(range(1, values.ndim))
        scales = torch.from_numpy(weight_scales(values, axes, limit)).reshape(-1)
        self._set_scales(len(self.zero_points) + self.starts[number], scales)
        return scales

    def _set_scales(self, start: int, scales: torch.Tensor) -> None:
        self.initial[start : start + len(scales)] = scales
        # Through `data`, as the call in progress holds parts of the parameter.
        self.log_scales.data[start : start + len(scales)] = 0


class Rounding:
    """The rounding of one call of a graph, which reads all scales at once.

    Attributes:
        table: the scales.
        logs: `Scales.log_scales` of each tensor, then of each weight.
        encodings: scale and zero point of each quantized tensor; tensors in compiled code, where
            reading a number would split the graph.
    """

    def __init__(self, table: Scales) -> None:
        self.table = table
        logs, points, count = table.log_scales, table.zero_points, len(table.zero_points)
        self.logs = logs.split(table.sizes)
        tensors, rows = (table.initial * logs.detach().exp()).tensor_split((count,))
        self._rows = rows.float()
        compiled = torch.compiler.is_compiling()
        self.encodings: list[Any] = list(
            zip(tensors.float().unbind(), points.unbind(), strict=True)
            if compiled
            else zip(tensors.tolist(), points.tolist(), strict=True)
        )

    def round_tensor(self, x: torch.Tensor, number: int) -> torch.Tensor:
        """Return a tensor after quantize and dequantize, in float32."""
        x = x.float()
        encoding = self.encodings[number]
        if self.table.observing:
            self.table.observe_tensor(number, x.detach())
            encoding = self.table.initial[number].float(), self.table.zero_points[number]
            if not torch.compiler.is_compiling():
                params = self.table.quant_params()[number]
                encoding = params.scale, params.zero_point
        return RoundActivation.apply(x, self.logs[number], *encoding)

    def round_weight(self, weight: torch.Tensor, number: int) -> torch.Tensor:
        """Return a weight after quantize and dequantize."""
        form, log = self.table.forms[number], self.logs[len(self.encodings) + number]
        scales, offsets = self.get_row_parameters(number)
        if self.table.observing and offsets is None:
            scales = self.table.observe_weight(number, weight).view(form.per_row)
        return RoundWeight.apply(form, weight, log, scales, offsets)

    def get_row_parameters(self, number: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the scales and offsets of a weight, to broadcast with its rows."""
        form, start = self.table.forms[number], self.table.starts[number]
        scales = self._rows.narrow(0, start, form.row_count).view(form.per_row)
        if not form.has_offsets:
            return scales, None
        offsets = self.table.row_offsets.narrow(0, start, form.row_count).view(form.per_row)
        return scales.bfloat16().float(), offsets
