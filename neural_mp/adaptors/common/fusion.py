"""Which ops one integer kernel runs: a layer, its bias, a residual sum, an activation.

A framework says what its kernels can do behind a layer (`FusionRules`); which layer an op goes to,
where two could take it, is the same for all.
"""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Generic, TypeVar

#: An op as its framework has it; hashable.
N = TypeVar("N")
#: A tensor as its framework has it.
T = TypeVar("T")


#: The kinds of step that are no activation.
BIAS, SUM = "bias", "sum"


@dataclass(frozen=True)
class Step(Generic[N, T]):
    """One thing that a kernel does behind the product.

    Attributes:
        kind: `BIAS`, `SUM`, or the framework's word for an activation.
        ops: the ops it stands for, the last of which has the result.
        operand: what it takes beside the product: the bias, or the other term of the sum.
    """

    kind: str
    ops: tuple[N, ...]
    operand: T | None = None


@dataclass(frozen=True)
class FusionGroup(Generic[N, T]):
    """A layer and what its kernel can do behind it, in the order in which it does so."""

    head: N
    steps: tuple[Step[N, T], ...] = ()

    @property
    def bias(self) -> Step[N, T] | None:
        """The addition of a constant to every channel, if there is one."""
        return next((step for step in self.steps if step.kind == BIAS), None)

    @property
    def residual_sum(self) -> Step[N, T] | None:
        """The addition of another computed tensor, if there is one."""
        return next((step for step in self.steps if step.kind == SUM), None)

    @property
    def activation(self) -> Step[N, T] | None:
        """The activation, if there is one."""
        return next((step for step in self.steps if step.kind not in (BIAS, SUM)), None)

    @property
    def members(self) -> tuple[N, ...]:
        """The ops that run along with the layer."""
        return tuple(op for step in self.steps for op in step.ops)

    @property
    def tail(self) -> N:
        """The op whose result the kernel writes."""
        return (self.head, *self.members)[-1]

    def reduced(self, runs_along: Callable[[N], bool]) -> FusionGroup[N, T]:
        """The group up to the first step of which an op does not run along under a plan."""
        kept = takewhile(lambda step: all(map(runs_along, step.ops)), self.steps)
        return FusionGroup(self.head, tuple(kept))


class FusionRules(ABC, Generic[N, T]):
    """What the integer kernels of a framework can do behind a layer, asked in their order.

    Every method is given the layer with the steps found so far, and looks at what reads the last
    result (`FusionGroup.tail`); where several ops do, none of them can run along.
    """

    def bias(self, group: FusionGroup[N, T]) -> Step[N, T] | None:
        """A constant that is added to every channel, if the kernel can do that."""
        return None

    def residual_sum(self, group: FusionGroup[N, T]) -> Step[N, T] | None:
        """Another computed tensor that is added, if the kernel can do that."""
        return None

    def activation(self, group: FusionGroup[N, T]) -> Step[N, T] | None:
        """An activation, if the kernel can do it."""
        return None


def find_fusion_groups(layers: Sequence[N], rules: FusionRules[N, T]) -> dict[N, FusionGroup[N, T]]:
    """Layer → its fusion group.

    Of two layers that meet in a sum, the later one takes it: the other's result is ready by then.

    Args:
        layers: the layers that have an integer kernel, in the order in which they run.
        rules: what these kernels can do.
    """
    taken: set[N] = set()
    found: dict[N, FusionGroup[N, T]] = {}
    for layer in reversed(layers):
        group = FusionGroup[N, T](layer)
        for find in (rules.bias, rules.residual_sum, rules.activation):
            step = find(group)
            if step is not None and taken.isdisjoint(step.ops):
                group = FusionGroup(layer, (*group.steps, step))
        taken.update(group.members)
        found[layer] = group
    return dict(reversed(found.items()))


def fused_into(groups: Iterable[FusionGroup[N, T]]) -> dict[N, N]:
    """Op that a layer's kernel can run along → that layer."""
    return {op: group.head for group in groups for op in group.members}
