"""Runs of small ops as one autograd function.

A step of a small net is mostly the bookkeeping of autograd for each op, and quantization adds ops.
Consecutive roundings, dense layers, sums and ReLUs are therefore run without it, as one function
with its own gradients. The numbers are those of the ops one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule

from neural_mp.adaptors.pytorch.training.autocast import is_open
from neural_mp.adaptors.pytorch.training.fake_quantize import tensor_factor
from neural_mp.adaptors.pytorch.training.run_steps import Encodings, Quantize, Step
from neural_mp.adaptors.pytorch.training.scales import Rounding
from neural_mp.adaptors.pytorch.training.weight_rows import SAVED, WeightGroup


@dataclass(frozen=True)
class RoundedGroup:
    """Weights that a run rounds together.

    Attributes:
        part: its part of the scales.
        group: the group.
        sources: places of the weights.
        results: places of the rounded weights.
    """

    part: int
    group: WeightGroup
    sources: tuple[int, ...]
    results: tuple[int, ...]


@dataclass(frozen=True)
class Program:
    """Ops of a run. Its values are, in order: logs of scales, inputs, rounded weights, results.

    Attributes:
        part: the part of the scales with those of its tensors; None without any.
        inputs: number of inputs.
        groups: weights that are rounded.
        steps: the ops.
        results: places of the values that others read.
    """

    part: int | None
    inputs: int
    groups: tuple[RoundedGroup, ...]
    steps: tuple[Step, ...]
    results: tuple[int, ...]

    @cached_property
    def quantized(self) -> tuple[Quantize, ...]:
        """Ops that quantize, in the order of the logs of their scales."""
        return tuple(step for step in self.steps if isinstance(step, Quantize))

    @cached_property
    def logs(self) -> int:
        """Number of logs of scales."""
        return len(self.quantized)

    @cached_property
    def saved(self) -> tuple[int, ...]:
        """Places of the values that gradients read."""
        return tuple(sorted({place for step in self.steps for place in step.saved}))

    @cached_property
    def backwards(self) -> tuple[Step, ...]:
        """The ops in the order of gradients."""
        return self.steps[::-1]

    @cached_property
    def _wanted(self) -> dict[tuple[bool, ...], list[bool]]:
        return {}

    def wanted(self, needed: tuple[bool, ...]) -> list[bool]:
        """Return for each place whether its gradient is needed, given those of all arguments."""
        if needed not in self._wanted:
            first = 1 + len(self.groups)
            found = [needed[0]] * self.logs + list(needed[first:])
            found += [True for each in self.groups for _ in each.results]
            for step in self.steps:
                found.append(any(found[source] for source in step.sources))
            self._wanted[needed] = found
        return self._wanted[needed]

    @cached_property
    def _factors(self) -> dict[tuple[int, ...], torch.Tensor]:
        return {}

    def factors(self, sizes: tuple[int, ...]) -> torch.Tensor:
        """Return the factors of the gradients by logs, given the numbers of values of tensors."""
        if sizes not in self._factors:
            self._factors[sizes] = torch.tensor([tensor_factor(size) for size in sizes])
        return self._factors[sizes]


class _Run(torch.autograd.Function):
    """The ops of a program."""

    @staticmethod
    def forward(
        ctx: Any,
        program: Program,
        encodings: Encodings,
        rows: Sequence[tuple[torch.Tensor, torch.Tensor | None]],
        *arguments: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        """Return the results; arguments are logs of tensors and of each group, then inputs."""
        values: list[Any] = [None] * program.logs
        values += arguments[1 + len(program.groups) :]
        kept: list[Any] = []
        for each, numbers in zip(program.groups, rows, strict=True):
            weights, saved = each.group.round([values[place] for place in each.sources], *numbers)
            values += weights
            kept.append(saved)
        for step in program.steps:
            values.append(step.run(values, encodings))
        ctx.save_for_backward(
            *[values[place] for place in program.saved], *[part for saved in kept for part in saved]
        )
        ctx.program, ctx.encodings = program, encodings
        ctx.set_materialize_grads(False)
        return tuple([values[place] for place in program.results])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Return the gradients of the arguments."""
        program, encodings, needed = ctx.program, ctx.encodings, ctx.needs_input_grad[3:]
        wanted, saved = program.wanted(needed), ctx.saved_tensors
        values: list[Any] = [None] * len(wanted)
        for place, value in zip(program.saved, saved, strict=False):
            values[place] = value
        found: list[Any] = [None] * len(wanted)
        for place, grad in zip(program.results, grads, strict=True):
            found[place] = grad
        for step in program.backwards:
            grad = found[step.result]
            if grad is None:
                continue
            for place, part in step.gradients(grad, values, encodings, wanted):
                known = found[place]
                found[place] = part if known is None else known + part
        by_tensors = _by_logs(program, values, found) if needed[0] else None
        by_groups = _by_weights(program, saved[len(program.saved) :], found, needed)
        inputs = found[program.logs : program.logs + program.inputs]
        return None, None, None, by_tensors, *by_groups, *inputs


def _by_logs(program: Program, values: Sequence[Any], found: Sequence[Any]) -> torch.Tensor:
    """Return the gradient by the logs of the scales of tensors."""
    sums = found[: program.logs]
    if any(each is None for each in sums):
        zero = next(each for each in sums if each is not None).new_zeros(())
        sums = [zero if each is None else each for each in sums]
    sizes = tuple([values[each.sources[0]].numel() for each in program.quantized])
    by_logs = torch.stack(sums)
    return by_logs.mul_(program.factors(sizes).to(by_logs.device))


def _by_weights(
    program: Program, saved: Sequence[Any], found: list[Any], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Put the gradients by weights to `found`, and return those by the logs of their scales."""
    by_groups: list[torch.Tensor | None] = []
    for place, each in enumerate(program.groups):
        mine = saved[place * SAVED : (place + 1) * SAVED]
        grads = [
            saved[0].new_zeros(form.shape) if found[result] is None else found[result]
            for result, form in zip(each.results, each.group.members, strict=True)
        ]
        by_logs, by_weights = each.group.gradients(grads, mine, needed[1 + place])
        by_groups.append(by_logs)
        for source, part in zip(each.sources, by_weights, strict=True):
            found[source] = part
    return by_groups


class FusedRun(nn.Module):
    """A run of ops.

    Attributes:
        plain: the ops as a graph, whose inputs are the rounding and then those of the run.
        program: the ops with their gradients.
    """

    def __init__(self, plain: GraphModule, program: Program) -> None:
        super().__init__()
        self.plain, self.program = plain, program

    def forward(self, rounding: Rounding, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the results of the run."""
        if rounding.is_plain or is_open() or torch.is_autocast_enabled("cpu"):
            results: tuple[torch.Tensor, ...] = self.plain(rounding, *inputs)
            return results
        program, logs = self.program, rounding.logs
        found: tuple[torch.Tensor, ...] = _Run.apply(
            program,
            rounding.encodings,
            [rounding.rows_of_part(each.part, 0, each.group) for each in program.groups],
            None if program.part is None else logs[program.part],
            *[logs[each.part] for each in program.groups],
            *inputs,
        )
        return found
