"""Training steps of a simulation, its checkpoints, and the origin of NaN."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.simulation import LEAST_POWER, inputs_and_targets
from neural_mp.adaptors.common.training_choices import OptimizerChoice
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import flat_inputs
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.training.choices import optimizer_of
from neural_mp.adaptors.pytorch.training.numerics_trace import loss_value
from neural_mp.adaptors.pytorch.training.places import PLACE
from neural_mp.adaptors.pytorch.training.simulated_module import SimulatedModule
from neural_mp.errors import ConfigurationError

_ADAM = OptimizerChoice()


class Trainer:
    """Steps of an optimizer on the weights and scales of a simulation.

    Without a loss, batches are inputs alone, and the outputs are trained towards those of the FP32
    model.
    """

    def __init__(
        self,
        model: SimulatedModule,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: OptimizerChoice = _ADAM,
    ) -> None:
        self.model, self.loss = model, loss
        self.optimizer = optimizer_of(model, optimizer)

    def step(self, batch: Any, learning_rate: float) -> float:
        """See the protocol."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.train()
        with torch.enable_grad():
            loss = self._loss(batch)
            number = float(loss.detach())
            if torch.isfinite(loss):
                self.optimizer.zero_grad(set_to_none=True)
                loss.backward()
                grads = [p.grad for p in self.model.parameters() if p.grad is not None]
                if torch.stack([grad.norm() for grad in grads]).isfinite().all():
                    self.optimizer.step()
                else:
                    number = math.nan
        self.model.eval()
        return number

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, targets = inputs_and_targets(batch, self.loss is not None)
        outputs = self._run(inputs)
        if self.loss is not None:
            return loss_value(self.loss, outputs, pytree.tree_map(_to_tensor, targets))
        call = self._bind_inputs(inputs)
        with torch.no_grad():
            reference = self.model.source.given.module(*call.args, **call.kwargs)
        return _mean_output_nsr(outputs, reference)

    def _run(self, inputs: Any) -> Any:
        call = self._bind_inputs(inputs)
        return self.model(*call.args, **call.kwargs)

    def _bind_inputs(self, inputs: Any) -> CallArgs:
        model: TorchModel = self.model.source.given
        return model.call(pytree.tree_map(_to_tensor, inputs))

    def first_non_finite(self, batch: Any) -> str | None:
        """Return the place of the first NaN or Inf of a batch; None if all numbers are finite."""
        inputs, _ = inputs_and_targets(batch, self.loss is not None)
        locations: list[str] = []
        parts = [self.model.part(path) for path in self.model.source.parts]

        def trace_part(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not locations and isinstance(part, GraphModule):
                tracer = _Tracer(part)
                tracer.run(*flat_inputs(part, args, kwargs), enable_io_processing=False)
                locations.extend(tracer.found)

        handles = [part.register_forward_pre_hook(trace_part, with_kwargs=True) for part in parts]
        try:
            with torch.no_grad():
                self._run(inputs)
        finally:
            for handle in handles:
                handle.remove()
        return next(iter(locations), None)

    def state(self) -> bytes:
        """Return weights, scales, optimizer and random state, for `load`."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        stored = io.BytesIO()
        torch.save(parts, stored)
        return stored.getvalue()

    def load(self, state: bytes, *, resume: bool = False) -> None:
        """Restore a result of `state`; see the protocol."""
        try:
            parts = torch.load(io.BytesIO(state), weights_only=True)
            self.model.load_state_dict(parts["model"])
            self.optimizer.load_state_dict(parts["optimizer"])
            if resume:
                torch.set_rng_state(parts["random"])
        except (pickle.UnpicklingError, RuntimeError, KeyError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"the checkpoint must be of the same model and plan: {error}; use another folder"
            ) from error


def _to_tensor(value: Any) -> Any:
    return torch.as_tensor(value) if hasattr(value, "__array__") else value


def _mean_output_nsr(outputs: Any, reference: Any) -> torch.Tensor:
    pairs = zip(pytree.tree_leaves(outputs), pytree.tree_leaves(reference), strict=True)
    noises = [
        (output.float() - expected.float()).square().sum()
        / expected.float().square().sum().clamp_min(LEAST_POWER)
        for output, expected in pairs
        if fx.is_float(output)
    ]
    if not noises:
        raise ConfigurationError("self-distillation requires a float output, got none; set loss")
    return torch.stack(noises).mean()


class _Tracer(Interpreter):
    """Runs a graph and records the place of the first NaN or Inf."""

    def __init__(self, module: GraphModule) -> None:
        super().__init__(module)
        self.found: list[str] = []

    def run_node(self, n: Node) -> Any:
        """Run a node, and record its place if its result is not finite."""
        value = super().run_node(n)
        if not self.found and PLACE in n.meta:
            leaves = (leaf for leaf in pytree.tree_leaves(value) if fx.is_float(leaf))
            if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
                self.found.append(n.meta[PLACE])
        return value
