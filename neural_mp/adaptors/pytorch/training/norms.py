"""Layers with a batch norm that is folded into their quantized weight, and trained for some steps.

While trained, the norm uses the statistics of the batch, and the quantized weight is folded with
the running ones, so that the scales stay calm (Krishnamoorthi, "Quantizing deep convolutional
networks for efficient inference", 2018, section 3.2.2). Afterwards, and in inference, both are
folded with the running statistics, as in the converted model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Node

from neural_mp.adaptors.pytorch.capture.canonicalize import list_source_modules
from neural_mp.adaptors.pytorch.training.scales import Rounding

#: Lower bound of the magnitude of a norm's scale, by which the folded weight is divided.
_LEAST_FACTOR = 1e-6
#: Largest relative difference of folded weights that only the order of rounding causes.
_ROUNDING = 1e-4


@dataclass(frozen=True)
class NormSource:
    """The user's modules that were folded into a layer.

    Attributes:
        layer: the convolution.
        norm: its batch norm.
        paths: their paths in the model.
    """

    layer: nn.Module
    norm: nn.Module
    paths: tuple[str, str]

    @property
    def parameter_origins(self) -> Mapping[str, str]:
        """Parameter or buffer of the `NormedLayer` → its path in the model."""
        layer, norm = self.paths
        return {
            "weight": f"{layer}.weight",
            "bias": f"{layer}.bias",
            "norm_weight": f"{norm}.weight",
            "norm_bias": f"{norm}.bias",
            "running_mean": f"{norm}.running_mean",
            "running_var": f"{norm}.running_var",
        }


def find_norm_source(
    original: nn.Module | None, layer: Node, path: str, weight: torch.Tensor | None
) -> NormSource | None:
    """Return the modules folded into a layer; None if `weight` is not their folded weight.

    A correction may have rescaled the weight, and a model from a file has no modules.
    """
    paths = list_source_modules(layer, path)
    if original is None or weight is None or len(paths) != 2:
        return None
    layer_path, norm_path = paths
    modules = original.get_submodule(layer_path), original.get_submodule(norm_path)
    source = NormSource(*modules, (layer_path, norm_path))
    is_batch_norm = isinstance(source.norm, nn.modules.batchnorm._BatchNorm)
    own = getattr(source.layer, "weight", None)
    if not is_batch_norm or not isinstance(own, torch.Tensor) or own.shape != weight.shape:
        return None
    if source.norm.running_var is None or not source.norm.affine:
        return None
    with torch.no_grad():
        folded = own * _reshape_per_channel(
            _compute_weight_factor(source.norm, source.norm.weight), own.ndim
        )
        same = (folded - weight).abs().max() <= _ROUNDING * weight.abs().max()
    return source if bool(same) else None


def _compute_weight_factor(norm: Any, weight: torch.Tensor) -> torch.Tensor:
    return weight * torch.rsqrt(norm.running_var + norm.eps)


def _reshape_per_channel(values: torch.Tensor, axes: int) -> torch.Tensor:
    return values.view(-1, *[1] * (axes - 1))


class NormedLayer(nn.Module):
    """A convolution with a batch norm folded into its quantized weight.

    Attributes:
        trains_norm: whether the norm uses the statistics of the batch in training.
    """

    running_mean: torch.Tensor
    running_var: torch.Tensor

    def __init__(
        self, source: NormSource, target: Callable[..., Any], rest: tuple[Any, ...]
    ) -> None:
        super().__init__()
        layer: Any = source.layer
        norm: Any = source.norm
        self.weight = _copy_parameter(layer.weight)
        self.bias = None if layer.bias is None else _copy_parameter(layer.bias)
        self.norm_weight, self.norm_bias = _copy_parameter(norm.weight), _copy_parameter(norm.bias)
        self.register_buffer("running_mean", norm.running_mean.clone())
        self.register_buffer("running_var", norm.running_var.clone())
        self.eps, self.momentum = norm.eps, 0.1 if norm.momentum is None else norm.momentum
        self.target, self.rest = target, rest
        self.trains_norm = False

    def fold_norm(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return weight and bias with the norm folded into them, by running statistics."""
        factor = _compute_weight_factor(self, self.norm_weight)
        shift = -self.running_mean if self.bias is None else self.bias - self.running_mean
        weight = self.weight * _reshape_per_channel(factor, self.weight.ndim)
        return weight, shift * factor + self.norm_bias

    def forward(self, x: torch.Tensor, rounding: Rounding, number: int) -> torch.Tensor:
        """Return the result of the layer and its norm; `number` is that of its weight."""
        if not (self.trains_norm and self.training):
            weight, bias = self.fold_norm()
            return self.target(x, rounding.round_weight(weight, number), bias, *self.rest)
        # The norm follows, so the factor only decides which integers are nearest: it is multiplied
        # and divided by, and has no gradient of its own.
        factor = _compute_weight_factor(self, self.norm_weight.detach())
        least = torch.where(factor.abs() < _LEAST_FACTOR, _LEAST_FACTOR, factor)
        weight = rounding.round_weight(
            self.weight * _reshape_per_channel(factor, self.weight.ndim), number
        )
        weight = weight / _reshape_per_channel(least, weight.ndim)
        result = self.target(x, weight, self.bias, *self.rest)
        return nn.functional.batch_norm(
            result.float(),
            self.running_mean,
            self.running_var,
            self.norm_weight,
            self.norm_bias,
            True,
            self.momentum,
            self.eps,
        )


def _copy_parameter(parameter: torch.Tensor) -> nn.Parameter:
    return nn.Parameter(parameter.detach().clone(), requires_grad=parameter.requires_grad)
