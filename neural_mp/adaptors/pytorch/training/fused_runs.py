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
        return tuple(sorted({index for step in self.steps for index in step.saved}))

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
            flags = [needed[0]] * self.logs + list(needed[first:])
            flags += [True for entry in self.groups for _ in entry.results]
            for step in self.steps:
                flags.append(any(flags[source] for source in step.sources))
            self._wanted[needed] = flags
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
        rest: list[Any] = []
        for entry, numbers in zip(program.groups, rows, strict=True):
            weights, saved = entry.group.round([values[index] for index in entry.sources], *numbers)
            values += weights
            rest.append(saved)
        for step in program.steps:
            values.append(step.run(values, encodings))
        ctx.save_for_backward(
            *[values[index] for index in program.saved], *[part for saved in rest for part in saved]
        )
        ctx.program, ctx.encodings = program, encodings
        ctx.set_materialize_grads(False)
        return tuple([values[index] for index in program.results])

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        """Return the gradients of the arguments."""
        program, encodings, needed = ctx.program, ctx.encodings, ctx.needs_input_grad[3:]
        flags, saved = program.wanted(needed), ctx.saved_tensors
        values: list[Any] = [None] * len(flags)
        for index, value in zip(program.saved, saved, strict=False):
            values[index] = value
        gradients: list[Any] = [None] * len(flags)
        for index, grad in zip(program.results, grads, strict=True):
            gradients[index] = grad
        for step in program.backwards:
            grad = gradients[step.result]
            if grad is None:
                continue
            for index, part in step.gradients(grad, values, encodings, flags):
                total = gradients[index]
                gradients[index] = part if total is None else total + part
        by_tensors = _by_logs(program, values, gradients) if needed[0] else None
        by_groups = _by_weights(program, saved[len(program.saved) :], gradients, needed)
        inputs = gradients[program.logs : program.logs + program.inputs]
        return None, None, None, by_tensors, *by_groups, *inputs


def _by_logs(program: Program, values: Sequence[Any], gradients: Sequence[Any]) -> torch.Tensor:
    """Return the gradient by the logs of the scales of tensors."""
    sums = gradients[: program.logs]
    if any(entry is None for entry in sums):
        zero = next(entry for entry in sums if entry is not None).new_zeros(())
        sums = [zero if entry is None else entry for entry in sums]
    sizes = tuple([values[entry.sources[0]].numel() for entry in program.quantized])
    by_logs = torch.stack(sums)
    return by_logs.mul_(program.factors(sizes).to(by_logs.device))


def _by_weights(
    program: Program, saved: Sequence[Any], gradients: list[Any], needed: Sequence[bool]
) -> list[torch.Tensor | None]:
    """Put the gradients by weights to `gradients`, and return those by the logs of their scales."""
    by_groups: list[torch.Tensor | None] = []
    for index, entry in enumerate(program.groups):
        mine = saved[index * SAVED : (index + 1) * SAVED]
        grads = [
            saved[0].new_zeros(form.shape) if gradients[result] is None else gradients[result]
            for result, form in zip(entry.results, entry.group.members, strict=True)
        ]
        by_logs, by_weights = entry.group.gradients(grads, mine, needed[1 + index])
        by_groups.append(by_logs)
        for source, part in zip(entry.sources, by_weights, strict=True):
            gradients[source] = part
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
        outputs: tuple[torch.Tensor, ...] = _Run.apply(
            program,
            rounding.encodings,
            [rounding.rows_of_part(entry.part, 0, entry.group) for entry in program.groups],
            None if program.part is None else logs[program.part],
            *[logs[entry.part] for entry in program.groups],
            *inputs,
        )
        return outputs
