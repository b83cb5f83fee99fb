"""Ops of a fused run, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from neural_mp.adaptors.pytorch.training.fake_quantize import (
    gradient_by_log,
    gradient_within,
    hardtanh_backward,
    highest,
    rounded_tensor,
)

aten = torch.ops.aten
_threshold_backward = aten.threshold_backward.default
#: Place of a value in a run → the value; scale and zero point of each quantized tensor.
Values = Sequence[Any]
Encodings = Sequence[tuple[float, int]]
#: Gradients of places.
Gradients = Iterable[tuple[int, torch.Tensor]]


class Step(Protocol):
    """An op of a run.

    Attributes:
        sources: places of the values that it reads.
        result: place of its result.
    """

    @property
    def sources(self) -> tuple[int, ...]:
        """See above."""

    @property
    def result(self) -> int:
        """See above."""

    @property
    def saved(self) -> tuple[int, ...]:
        """Places of the values that its gradients read."""

    def run(self, values: Values, encodings: Encodings) -> torch.Tensor:
        """Return the result."""

    def gradients(
        self, grad: torch.Tensor, values: Values, encodings: Encodings, needed: Sequence[bool]
    ) -> Gradients:
        """Return the gradients of the sources that are wanted."""


@dataclass(frozen=True)
class Quantize:
    """Quantize and dequantize.

    Attributes:
        sources: places of the tensor, and of the log of the scale.
        result: place of the result.
        number: number of the tensor in the rounding.
        of_relu: whether the ReLU of the tensor is quantized.
    """

    sources: tuple[int, ...]
    result: int
    number: int
    of_relu: bool

    @property
    def saved(self) -> tuple[int, ...]:
        """Places of the values that its gradients read."""
        return self.sources[0], self.result

    def run(self, values: Values, encodings: Encodings) -> torch.Tensor:
        """Return the result."""
        scale, zero_point = encodings[self.number]
        least = zero_point if self.of_relu else 0
        return rounded_tensor(values[self.sources[0]], scale, zero_point, least)

    def gradients(
        self, grad: torch.Tensor, values: Values, encodings: Encodings, needed: Sequence[bool]
    ) -> Gradients:
        """Return the gradients of the sources that are wanted."""
        source, log = self.sources
        x = values[source]
        scale, zero_point = encodings[self.number]
        if self.of_relu:
            within = hardtanh_backward(grad, x, 0.0, highest(scale, zero_point))
        else:
            within = gradient_within(grad, x, scale, zero_point)
        if not needed[log]:
            return ((source, within),)
        by_log = log, gradient_by_log(grad, within, x, values[self.result])
        return ((source, within), by_log) if needed[source] else (by_log,)


@dataclass(frozen=True)
class _Linear:
    """A dense layer; the third source is its bias, if it has one."""

    sources: tuple[int, ...]
    result: int

    @property
    def saved(self) -> tuple[int, ...]:
        """Places of the values that its gradients read."""
        return self.sources[:2]

    def run(self, values: Values, encodings: Encodings) -> torch.Tensor:
        """Return the result."""
        return nn.functional.linear(*[values[source] for source in self.sources])

    def gradients(
        self, grad: torch.Tensor, values: Values, encodings: Encodings, needed: Sequence[bool]
    ) -> Gradients:
        """Return the gradients of the sources that are wanted."""
        source, weight, *bias = self.sources
        x, result = values[source], []
        rows = grad if grad.ndim == 2 else grad.reshape(-1, grad.shape[-1])
        if needed[source]:
            by_source = rows.mm(values[weight])
            result.append((source, by_source if grad.ndim == 2 else by_source.view(x.shape)))
        if needed[weight]:
            inputs = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
            result.append((weight, rows.t().mm(inputs)))
        result += [(index, rows.sum(0)) for index in bias if needed[index]]
        return result


@dataclass(frozen=True)
class _Relu:
    """A ReLU."""

    sources: tuple[int, ...]
    result: int

    @property
    def saved(self) -> tuple[int, ...]:
        """Places of the values that its gradients read."""
        return (self.result,)

    def run(self, values: Values, encodings: Encodings) -> torch.Tensor:
        """Return the result."""
        return torch.relu(values[self.sources[0]])

    def gradients(
        self, grad: torch.Tensor, values: Values, encodings: Encodings, needed: Sequence[bool]
    ) -> Gradients:
        """Return the gradients of the sources that are wanted."""
        return ((self.sources[0], _threshold_backward(grad, values[self.result], 0)),)


@dataclass(frozen=True)
class _Add:
    """A sum of two tensors of one shape."""

    sources: tuple[int, ...]
    result: int

    @property
    def saved(self) -> tuple[int, ...]:
        """Places of the values that its gradients read."""
        return ()

    def run(self, values: Values, encodings: Encodings) -> torch.Tensor:
        """Return the result."""
        first, second = self.sources
        return torch.add(values[first], values[second])

    def gradients(
        self, grad: torch.Tensor, values: Values, encodings: Encodings, needed: Sequence[bool]
    ) -> Gradients:
        """Return the gradients of the sources that are wanted."""
        return [(source, grad) for source in self.sources if needed[source]]


#: Function of a graph → its step.
STEPS: Mapping[object, Callable[[tuple[int, ...], int], Step]] = {
    aten.linear.default: _Linear,
    aten.relu.default: _Relu,
    aten.add.Tensor: _Add,
}
