"""Models to train: devices, advice and plans, and the origin of NaN and Inf."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from neural_mp.adaptors import registry
from neural_mp.adaptors.registry import find_training_for
from neural_mp.core.hardware import Device
from neural_mp.core.numerics_trace import NonFinite, first_non_finite
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision
from neural_mp.errors import ConfigurationError


def apply_plan(model: object, plan: PrecisionPlan | Advice | str | Path) -> Any:
    """Make a model train by a plan: some layers in 16 bits, the others in float32.

    Weights stay in float32. A Keras model gets dtype policies per layer, even if already built or
    compiled; if a layer runs in float16, the optimizer scales the loss. A torch module gets hooks
    that run the module under `torch.autocast` and exclude single modules; outputs are float32,
    and the training loop scales the loss (`GradScaler`). A previous plan is replaced.

    Args:
        model: a Keras model or a torch module; changed in place.
        plan: layer → precision, as returned by `advise`, or its YAML file. A name may denote a
            layer with sublayers; an entry for a sublayer takes precedence. Layers without an
            entry keep their policy in Keras; in torch they follow the enclosing layer.

    Returns:
        The model.

    Raises:
        UnknownFrameworkError: the model is neither a Keras model nor a torch module.
        UnknownOperatorError: the plan names a layer that the model does not have.
        ConfigurationError: the plan contains INT8, or both BF16 and FP16.
        PlanError: the file is not a plan.
    """
    _, training = find_training_for(model)
    if isinstance(plan, Advice):
        plan = plan.plan
    elif isinstance(plan, str | Path):
        plan = PrecisionPlan.load(plan)
    if not isinstance(plan, PrecisionPlan):
        raise ConfigurationError(
            f"plan must be an Advice, a PrecisionPlan or the path of a plan file, got {plan!r}"
        )
    wrong = [name for name, precision in plan.precisions.items() if precision is Precision.INT8]
    if wrong:
        raise ConfigurationError(
            f"plans for training may use bf16, fp16 and fp32, got int8 for {wrong[0]!r}"
        )
    low = {precision for precision in plan.precisions.values() if precision.is_16_bit}
    if len(low) > 1:
        raise ConfigurationError(
            "plans for training may use one 16-bit precision, got both bf16 and fp16"
        )
    return training.apply_plan(model, plan.precisions)


def first_nonfinite(
    model: object, batch: object, loss: object = None, *, loss_scale: float = 1.0
) -> NonFinite | None:
    """Return the first layer that turns finite numbers into NaN or Inf, forward or backward.

    The model runs in training mode, and its state is restored. For torch, call under the same
    `autocast` as the training.

    Args:
        model: a Keras model or a torch module.
        batch: `(inputs, targets)` or inputs alone.
        loss: the training loss, needed for the backward pass. Keras: a loss, its name, or a
            function of targets and outputs; default: the loss that the model was compiled with.
            torch: a function of outputs and targets.
        loss_scale: the factor applied to the loss in training.

    Returns:
        The origin, with `layer` and `words`; None if all numbers are finite.

    Raises:
        UnknownFrameworkError: the model is neither a Keras model nor a torch module.
        ConfigurationError: the loss is not a loss, or returns more than one number.
        DataError: the batch does not fit the model.
    """
    _, training = find_training_for(model)
    return first_non_finite(training.trace_numerics(model, batch, loss, loss_scale))


def devices() -> tuple[Device, ...]:
    """Return the devices that the frameworks in use can access; `str` describes a device.

    Query the frameworks that are already imported. If none is, import all installed frameworks,
    which takes some seconds.
    """
    return tuple(device for part in registry.list_training_parts() for device in part.devices())


def is_gpu_available() -> bool:
    """Whether a framework in use can access a GPU: CUDA, XPU or any `torch.accelerator`."""
    return any(device.is_accelerator for device in devices())


@dataclass(frozen=True)
class LayerAdvice:
    """Advice for one layer.

    Attributes:
        name, kind: name and class of the layer.
        keep: whether the layer must stay in float32.
        reason: the reason, as text.
        noise: largest ‖g₁₆ − g₃₂‖² / ‖g₃₂‖² of the model's gradients with only this layer in
            16 bits; infinite if they were not finite, NaN if the layer was never tested alone.
        step: training step at which `noise` was measured.
    """

    name: str
    kind: str
    keep: bool = False
    reason: str = ""
    noise: float = math.nan
    step: int = 0


@dataclass(frozen=True)
class Advice:
    """Layers to keep in float32.

    Attributes:
        precision: BF16 or FP16, for all other layers.
        layers: layer → advice, in the model's order.
        noise: largest gradient noise with the advice applied.
        steps: number of float32 training steps.
        passes: number of forward and backward passes, including training steps.
        framework: `tensorflow` or `pytorch`.
        warnings: further remarks.
    """

    precision: Precision
    layers: Mapping[str, LayerAdvice]
    noise: float
    steps: int
    passes: int
    framework: str = ""
    warnings: tuple[str, ...] = ()

    @property
    def keep(self) -> tuple[str, ...]:
        """The layers that must stay in float32."""
        return tuple(layer.name for layer in self.layers.values() if layer.keep)

    @property
    def plan(self) -> PrecisionPlan:
        """The advice as a plan, for `apply_plan` and YAML files."""
        low, high = OpConfig(self.precision), OpConfig(Precision.FP32)
        return PrecisionPlan(
            {layer.name: high if layer.keep else low for layer in self.layers.values()}
        )

    def save_plan(self, path: str | Path) -> None:
        """Write the plan to a YAML file.

        Raises:
            PlanError: the file cannot be written.
        """
        self.plan.save(path, framework=self.framework)

    @property
    def table(self) -> Table:
        """One row per layer: training precision and reason."""
        table = Table(title=str(self), title_justify="left")
        for heading in ("layer", "class", "trained in", "noise", "because"):
            table.add_column(heading, overflow="fold")
        for layer in self.layers.values():
            runs = Text("fp32", "yellow") if layer.keep else Text(self.precision.value, "green")
            noise = "" if math.isnan(layer.noise) else f"{layer.noise:.2g}"
            table.add_row(layer.name, layer.kind, runs, noise, layer.reason)
        return table

    def __str__(self) -> str:
        layers = ", ".join(self.keep) or "no layer"
        return f"{self.precision}: keep {layers} of {len(self.layers)} in float32"
