"""Losses and optimizers of PyTorch by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F

from neural_mp.adaptors.common.training_choices import (
    CROSS_ENTROPY,
    LossChoice,
    OptimizerChoice,
)
from neural_mp.adaptors.pytorch.training.simulated_module import SimulatedModule
from neural_mp.errors import ConfigurationError

_KINDS = {"SGD": torch.optim.SGD, "Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
_NAMES = {"epsilon": "eps"}
_BETAS = ("beta_1", "beta_2")
_DEFAULT_BETAS = (0.9, 0.999)


def chosen_loss(choice: LossChoice) -> Callable[[Any, Any], torch.Tensor]:
    """Return a loss as a function of outputs and targets.

    Raises:
        ConfigurationError: PyTorch has no such loss.
    """
    if choice.name != CROSS_ENTROPY:
        raise ConfigurationError(
            f"the loss of a PyTorch model must be {CROSS_ENTROPY}, got {choice.name}; set "
            f"{CROSS_ENTROPY}, or loss in Python"
        )
    reduction = "sum" if choice.sums else "mean"

    def cross_entropy(outputs: Any, targets: Any) -> torch.Tensor:
        # Files have class numbers in 32 bits, too, which PyTorch refuses.
        wanted = targets if targets.is_floating_point() else targets.long()
        return F.cross_entropy(outputs, wanted, reduction=reduction)

    return cross_entropy


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
