"""Result of training advice: per layer, as a table and as a plan."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import OpConfig, Precision


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
