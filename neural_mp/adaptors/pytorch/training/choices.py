"""Losses and optimizers of PyTorch by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional as F

from neural_mp.adaptors.common.training_choices import (
    BINARY_CROSS_ENTROPY,
    CROSS_ENTROPY,
    SQUARED_ERROR,
    LossChoice,
    OptimizerChoice,
    are_class_numbers,
    check_targets,
)
from neural_mp.adaptors.pytorch.training.simulated_module import SimulatedModule
from neural_mp.errors import ConfigurationError

_KINDS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
_NAMES = {"epsilon": "eps"}
_BETAS = ("beta_1", "beta_2")
_DEFAULT_BETAS = (0.9, 0.999)
#: Losses that read one target for each output; outputs are logits.
_BY_OUTPUT: Mapping[str, Callable[..., torch.Tensor]] = {
    BINARY_CROSS_ENTROPY: F.binary_cross_entropy_with_logits,
    SQUARED_ERROR: F.mse_loss,
}


def chosen_loss(choice: LossChoice) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss as a function of outputs and targets.

    Raises:
        ConfigurationError: PyTorch has no such loss.
    """
    reduction = "sum" if choice.sums else "mean"
    if choice.name in _BY_OUTPUT:
        return partial(_by_output, _BY_OUTPUT[choice.name], reduction)
    if choice.name != CROSS_ENTROPY:
        supported = ", ".join((CROSS_ENTROPY, *_BY_OUTPUT))
        raise ConfigurationError(
            f"the loss of a PyTorch model must be one of {supported}, got {choice.name}; set "
            f"{CROSS_ENTROPY}, or loss in Python"
        )
    return partial(_cross_entropy, reduction)


def _cross_entropy(reduction: str, outputs: Any, targets: Any) -> torch.Tensor:
    if targets.is_floating_point() and targets.shape == outputs.shape:
        return F.cross_entropy(outputs, targets, reduction=reduction)
    if targets.ndim == outputs.ndim and are_class_numbers(targets.shape, outputs.shape):
        targets = targets.squeeze(-1)
    # Files have class numbers in 32 bits, too, which PyTorch refuses.
    return F.cross_entropy(outputs, targets.long(), reduction=reduction)


def _by_output(
    loss: Callable[..., torch.Tensor], reduction: str, outputs: Any, targets: Any
) -> torch.Tensor:
    check_targets(targets.shape, outputs.shape)
    expected = targets.reshape(outputs.shape).to(outputs.dtype)
    return loss(outputs, expected, reduction=reduction)


def optimizer_of(model: SimulatedModule, choice: OptimizerChoice) -> torch.optim.Optimizer:
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
