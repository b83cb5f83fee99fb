"""Training steps of a simulation, losses and optimizers by name, checkpoints, origin of NaN."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule, Interpreter, Node
from torch.nn import functional as F
from torch.utils import _pytree as pytree

from neural_mp.adaptors.common.simulation import (
    BINARY_CROSS_ENTROPY,
    CROSS_ENTROPY,
    LEAST_POWER,
    SQUARED_ERROR,
    LossChoice,
    OptimizerChoice,
    are_class_numbers,
    check_targets,
    inputs_and_targets,
)
from neural_mp.adaptors.pytorch.graph import graph_edit as fx
from neural_mp.adaptors.pytorch.graph.call_signature import CallArgs, is_array, view_as_tensor
from neural_mp.adaptors.pytorch.graph.dynamic_shapes import list_flat_inputs
from neural_mp.adaptors.pytorch.graph.model import TorchModel
from neural_mp.adaptors.pytorch.training.numerics_trace import compute_loss_value
from neural_mp.adaptors.pytorch.training.simulated_module import PLACE, SimulatedModule
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
        self.optimizer = create_chosen_optimizer(model, optimizer)

    def step(self, batch: object, learning_rate: float) -> float:
        """See the protocol."""
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.model.train()
        with torch.enable_grad():
            loss = self._compute_loss(batch)
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

    def _compute_loss(self, batch: object) -> torch.Tensor:
        inputs, targets = inputs_and_targets(batch, self.loss is not None)
        outputs = self._run_model(inputs)
        if self.loss is not None:
            return compute_loss_value(self.loss, outputs, pytree.tree_map(_to_tensor, targets))
        call = self._bind_inputs(inputs)
        with torch.no_grad():
            reference = self.model.source.given.module(*call.args, **call.kwargs)
        return _mean_output_nsr(outputs, reference)

    def _run_model(self, inputs: object) -> Any:
        call = self._bind_inputs(inputs)
        return self.model(*call.args, **call.kwargs)

    def _bind_inputs(self, inputs: object) -> CallArgs:
        model: TorchModel = self.model.source.given
        return model.call(pytree.tree_map(_to_tensor, inputs))

    def first_non_finite(self, batch: object) -> str | None:
        """Return the place of the first NaN or Inf of a batch; None if all numbers are finite."""
        inputs, _ = inputs_and_targets(batch, self.loss is not None)
        locations: list[str] = []
        parts = [self.model.get_part(path) for path in self.model.source.parts]

        def trace_part(part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if not locations and isinstance(part, GraphModule):
                tracer = _Tracer(part)
                tracer.run(*list_flat_inputs(part, args, kwargs), enable_io_processing=False)
                locations.extend(tracer.found)

        handles = [part.register_forward_pre_hook(trace_part, with_kwargs=True) for part in parts]
        try:
            with torch.no_grad():
                self._run_model(inputs)
        finally:
            for handle in handles:
                handle.remove()
        return next(iter(locations), None)

    def save_state(self) -> bytes:
        """Return weights, scales, optimizer and random state, for `load_state`."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "random": torch.get_rng_state(),
        }
        stored = io.BytesIO()
        torch.save(parts, stored)
        return stored.getvalue()

    def load_state(self, state: bytes, *, resume: bool = False) -> None:
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


def _to_tensor(value: object) -> object:
    return view_as_tensor(value) if is_array(value) else value


def _mean_output_nsr(outputs: object, reference: object) -> torch.Tensor:
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
        value = super().run_node(n)
        if not self.found and PLACE in n.meta:
            leaves = (leaf for leaf in pytree.tree_leaves(value) if fx.is_float(leaf))
            if not all(bool(torch.isfinite(leaf).all()) for leaf in leaves):
                self.found.append(n.meta[PLACE])
        return value


_KINDS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
_NAMES = {"epsilon": "eps"}
_BETAS = ("beta_1", "beta_2")
_DEFAULT_BETAS = (0.9, 0.999)
#: Losses that read one target for each output; outputs are logits.
_BY_OUTPUT: Mapping[str, Callable[..., torch.Tensor]] = {
    BINARY_CROSS_ENTROPY: F.binary_cross_entropy_with_logits,
    SQUARED_ERROR: F.mse_loss,
}


def choose_loss_function(choice: LossChoice) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss as a function of outputs and targets.

    Raises:
        ConfigurationError: PyTorch has no such loss.
    """
    reduction = "sum" if choice.sums_losses else "mean"
    if choice.name in _BY_OUTPUT:
        return partial(_match_output_shape, _BY_OUTPUT[choice.name], reduction)
    if choice.name != CROSS_ENTROPY:
        supported = ", ".join((CROSS_ENTROPY, *_BY_OUTPUT))
        raise ConfigurationError(
            f"the loss of a PyTorch model must be one of {supported}, got {choice.name}; set "
            f"{CROSS_ENTROPY}, or loss in Python"
        )
    return partial(_compute_cross_entropy, reduction)


def _compute_cross_entropy(
    reduction: str, outputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    if targets.is_floating_point() and targets.shape == outputs.shape:
        return F.cross_entropy(outputs, targets, reduction=reduction)
    if targets.ndim == outputs.ndim and are_class_numbers(targets.shape, outputs.shape):
        targets = targets.squeeze(-1)
    # Files have class numbers in 32 bits, too, which PyTorch refuses.
    return F.cross_entropy(outputs, targets.long(), reduction=reduction)


def _match_output_shape(
    loss: Callable[..., torch.Tensor], reduction: str, outputs: torch.Tensor, targets: torch.Tensor
) -> torch.Tensor:
    check_targets(targets.shape, outputs.shape)
    expected = targets.reshape(outputs.shape).to(outputs.dtype)
    return loss(outputs, expected, reduction=reduction)


def create_chosen_optimizer(
    model: SimulatedModule, choice: OptimizerChoice
) -> torch.optim.Optimizer:
    """Return an optimizer of the weights and scales that are trained.

    Raises:
        ConfigurationError: PyTorch refuses the options.
    """
    options = {
        _NAMES.get(name, name): value
        for name, value in choice.options.items()
        if name not in _BETAS
    }
    if any(name in choice.options for name in _BETAS):
        pairs = zip(_BETAS, _DEFAULT_BETAS, strict=True)
        options["betas"] = tuple(choice.options.get(name, default) for name, default in pairs)
    parameters: Any = [p for p in model.parameters() if p.requires_grad]
    if choice.decays or choice.name == "AdamW":  # decays by default
        scales = [p for p in model.scales() if p.requires_grad]
        weights = [p for p in model.weights() if p.requires_grad]
        parameters = [{"params": weights}, {"params": scales, "weight_decay": 0.0}]
        parameters = [group for group in parameters if group["params"]]
    try:
        # One call for all parameters: of small nets, a call per scale takes most of a step.
        return _KINDS[choice.name](parameters, fused=True, **options)
    except ValueError as error:
        raise ConfigurationError(f"the optimizer {choice.name}: {error}") from error
