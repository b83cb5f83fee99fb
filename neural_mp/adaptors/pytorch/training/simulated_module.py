"""The module of a simulation, for the user's own training loop, and names of its values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, Node

from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.training.norms import NormedLayer
from neural_mp.adaptors.pytorch.training.scales import Scales
from neural_mp.adaptors.pytorch.versions import disable_compilation


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

    def forward(self, *args: object, **kwargs: object) -> Any:
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

    def get_part(self, path: str) -> nn.Module:
        """Return the graph of a captured module; the empty path is the whole model."""
        return self.network.get_submodule(path)

    @disable_compilation
    def _advance_uncompiled(self) -> None:
        self._advance_schedule()

    def _advance_schedule(self) -> None:
        """Set the phase of the schedule, and count a step in training mode."""
        step = int(self.steps) if self._has_phases else 0
        observes = self.training and step < self.schedule.observe_steps
        phase = observes, step < self.schedule.norm_steps
        if phase != self._phase:
            observing, norms = self._phase = phase
            for module in self.modules():
                if isinstance(module, NormedLayer):
                    module.trains_norm = norms
                elif isinstance(module, Scales):
                    module.observing = observing
        if self.training:
            self.steps.add_(1)  # in place: an assignment to a module takes much longer


#: Key of `Node.meta` for the place of a value that is checked for NaN.
PLACE = "neural_mp_place"


def name_places(graph: Graph) -> None:
    """Name the places of all tensors of a graph, before its ops are fused."""
    for node in graph.nodes:
        if node.op != "output" and fx.has_tensors(node):
            node.meta.setdefault(PLACE, _describe_location(node))


def _describe_location(node: Node) -> str:
    if node.op == "placeholder":
        return f"the input {fx.get_tensor_name(node)!r}"
    if fx.OP_NAME in node.meta:
        return f"the result of layer {node.meta[fx.OP_NAME]!r}"
    kind = "a weight" if node.op == "get_attr" else "a quantized tensor"
    return f"{kind} of layer {next(_iterate_consumer_ops(node), node.name)!r}"


def _iterate_consumer_ops(node: Node) -> Iterator[str]:
    """Yield the names of the ops that read a node's result, nearest first."""
    for user in node.users:
        if fx.OP_NAME in user.meta:
            yield str(user.meta[fx.OP_NAME])
        else:
            yield from _iterate_consumer_ops(user)
