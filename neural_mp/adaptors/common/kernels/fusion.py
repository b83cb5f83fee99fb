"""Fusion groups: the ops of one integer kernel, i.e. layer, bias, residual sum, activation.

A framework defines the epilogues of its kernels (`FusionRules`); the choice between two layers that
could fuse an op is shared by all frameworks. Scalings and shifts after a layer are combined
(`Affine`) to be folded into its constants.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from neural_mp.adaptors.common.quant_params import Array

#: A framework's op; hashable.
N = TypeVar("N")
#: A framework's tensor.
T = TypeVar("T")


#: The kinds of step other than activations.
BIAS, SUM = "bias", "sum"


@dataclass(frozen=True)
class Step(Generic[N, T]):
    """One epilogue step of a kernel.

    Attributes:
        kind: `BIAS`, `SUM`, or the framework's name of an activation.
        ops: the ops that the step replaces; the last has the result.
        operand: the second input: the bias, or the other term of the sum.
    """

    kind: str
    ops: tuple[N, ...]
    operand: T | None = None


@dataclass(frozen=True)
class FusionGroup(Generic[N, T]):
    """A layer and the epilogue steps of its kernel, in execution order."""

    head: N
    steps: tuple[Step[N, T], ...] = ()

    @property
    def bias(self) -> Step[N, T] | None:
        """The addition of a constant to every channel, or None."""
        return next((step for step in self.steps if step.kind == BIAS), None)

    @property
    def residual_sum(self) -> Step[N, T] | None:
        """The addition of another computed tensor, or None."""
        return next((step for step in self.steps if step.kind == SUM), None)

    @property
    def activation(self) -> Step[N, T] | None:
        """The activation, or None."""
        return next((step for step in self.steps if step.kind not in (BIAS, SUM)), None)

    @property
    def fused_ops(self) -> tuple[N, ...]:
        """The ops fused into the layer."""
        return tuple(op for step in self.steps for op in step.ops)

    @property
    def tail(self) -> N:
        """The op whose result the kernel writes."""
        return (self.head, *self.fused_ops)[-1]

    def fused_prefix(self, is_fused: Callable[[N], bool]) -> FusionGroup[N, T]:
        """Return the group up to the first step with an op that is not fused under a plan."""
        steps = takewhile(lambda step: all(map(is_fused, step.ops)), self.steps)
        return FusionGroup(self.head, tuple(steps))


class FusionRules(ABC, Generic[N, T]):
    """The epilogues of a framework's integer kernels; the methods are called in their order.

    Every method gets the layer with the steps found so far and examines the consumer of the last
    result (`FusionGroup.tail`); if there are several consumers, none can be fused.
    """

    def match_bias(self, group: FusionGroup[N, T]) -> Step[N, T] | None:
        """Return the addition of a constant to every channel, or None if unsupported."""
        return None

    def match_residual_sum(self, group: FusionGroup[N, T]) -> Step[N, T] | None:
        """Return the addition of another computed tensor, or None if unsupported."""
        return None

    def match_activation(self, group: FusionGroup[N, T]) -> Step[N, T] | None:
        """Return the activation, or None if unsupported."""
        return None


def find_fusion_groups(layers: Sequence[N], rules: FusionRules[N, T]) -> dict[N, FusionGroup[N, T]]:
    """Return layer → its fusion group, for layers with an integer kernel in execution order.

    If two layers meet in a sum, the later one fuses it: the other result is ready by then.
    """
    used: set[N] = set()
    groups: dict[N, FusionGroup[N, T]] = {}
    for layer in reversed(layers):
        group: FusionGroup[N, T] = FusionGroup(layer)
        for find in (rules.match_bias, rules.match_residual_sum, rules.match_activation):
            step = find(group)
            if step is not None and used.isdisjoint(step.ops):
                group = FusionGroup(layer, (*group.steps, step))
        used.update(group.fused_ops)
        groups[layer] = group
    return dict(reversed(groups.items()))


def map_fused_ops(groups: Iterable[FusionGroup[N, T]]) -> dict[N, N]:
    """Return op that a layer's kernel can fuse → that layer."""
    return {op: group.head for group in groups for op in group.fused_ops}


@dataclass
class Affine:
    """scale · x + shift per channel, in float64 so that a chain rounds once."""

    scale: NDArray[np.float64]
    shift: NDArray[np.float64]

    @classmethod
    def identity(cls, channels: int) -> Affine:
        """Return the identity map."""
        return cls(np.ones(channels), np.zeros(channels))

    def then_scale(self, factor: Array) -> None:
        """Multiply the channels by `factor`."""
        self.scale, self.shift = self.scale * factor, self.shift * factor

    def then_add(self, value: Array) -> None:
        """Add `value` to the channels."""
        self.shift = self.shift + value

    def then_normalize(self, parameters: Sequence[Array | None], epsilon: float) -> None:
        """Apply a batch norm in inference mode: `parameters` are scale, shift, mean, variance."""
        scale, shift, mean, variance = (
            None if value is None else value.astype(np.float64) for value in parameters
        )
        assert mean is not None
        assert variance is not None
        self.then_add(-mean)
        self.then_scale((1.0 if scale is None else scale) / np.sqrt(variance + epsilon))
        if shift is not None:
            self.then_add(shift)
