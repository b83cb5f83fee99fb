"""The module of a simulation, for the user's own training loop."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.pytorch.compiler import uncompiled
from neural_mp.adaptors.pytorch.training.norms import NormedLayer
from neural_mp.adaptors.pytorch.training.scales import Scales


class SimulatedModule(nn.Module):
    """A model that computes with the rounding of a plan, and can be trained.

    Called like the original. `state_dict` holds weights, scales and the number of steps, so that
    training can be resumed. The graph was captured in inference mode: there is no dropout.

    Attributes:
        network: the graph, or the user's code with graphs of its modules.
        schedule: schedule of scales and batch norms.
        source: origin of the simulation, which `finish` reads.
        record: values of the caller that travel with the module; shared by copies.
        steps: number of calls in training mode.
    """

    steps: torch.Tensor

    def __init__(self, network: nn.Module, schedule: TrainingSchedule, source: Any) -> None:
        super().__init__()
        self.network = network
        self.schedule = schedule
        self.source = source
        self.record: Any = None
        self._phase = False, False
        has_norms = any(isinstance(module, NormedLayer) for module in network.modules())
        # Reading the number of steps would cost a small net a part of each step.
        self._has_phases = schedule.observe_steps > 0 or has_norms
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model; a call in training mode is one step of the schedule."""
        if torch.compiler.is_compiling():
            self._advance_uncompiled()
        else:  # the wrapper of the compiler takes longer than the function
            self._advance_schedule()
        return self.network(*args, **kwargs)

    def weights(self) -> Iterator[nn.Parameter]:
        """Yield the parameters without the scales."""
        scales = {id(scale) for scale in self.scales()}
        yield from (p for p in self.parameters() if id(p) not in scales)

    def scales(self) -> Iterator[nn.Parameter]:
        """Yield the logarithms of the scales, e.g. for a group of their own in the optimizer."""
        for module in self.modules():
            if isinstance(module, Scales):
                yield module.log_scales

    def part(self, path: str) -> nn.Module:
        """Return the graph of a captured module; the empty path is the whole model."""
        return self.network.get_submodule(path)

    @uncompiled
    def _advance_uncompiled(self) -> None:
        self._advance_schedule()

    def _advance_schedule(self) -> None:
        """Set the phase of the schedule, and count a step in training mode."""
        step = int(self.steps) if self._has_phases else 0
        phase = self.training and self.schedule.observes(step), self.schedule.trains_norms(step)
        if phase != self._phase:
            observing, norms = self._phase = phase
            for module in self.modules():
                if isinstance(module, NormedLayer):
                    module.trains_norm = norms
                elif isinstance(module, Scales):
                    module.observing = observing
        if self.training:
            self.steps.add_(1)  # in place: an assignment to a module takes much longer
