"""What advice on training says: layer by layer, and as a plan."""

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
    """What is advised for a layer.

    Attributes:
        name, kind: what it is called, and its class.
        keep: whether it must stay in float32.
        reason: why, in words.
        noise: ‖g₁₆ − g₃₂‖² / ‖g₃₂‖² of the model's gradients with this layer alone in 16 bits,
            the worst that was seen; infinite where they were not finite, NaN where nothing
            called for a look at the layer by itself.
        step: the step of the run at which that was.
    """

    name: str
    kind: str
    keep: bool = False
    reason: str = ""
    noise: float = math.nan
    step: int = 0


@dataclass(frozen=True)
class Advice:
    """Which layers must stay in float32.

    Attributes:
        precision: BF16 or FP16, which the others are trained in.
        layers: layer → what is advised for it, in the model's order.
        noise: the worst noise of the gradients with the advice followed.
        steps: how many steps in float32 it was looked at along.
        passes: how many forward and backward passes that took, those steps included.
        framework: `tensorflow` or `pytorch`.
        warnings: what else should be known.
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
        """The same as a plan, for `apply_plan` and for a YAML file."""
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
        """A row for every layer: what it is trained in, and why."""
        table = Table(title=str(self), title_justify="left")
        for heading in ("layer", "class", "trained in", "noise", "because"):
            table.add_column(heading, overflow="fold")
        for layer in self.layers.values():
            runs = Text("fp32", "yellow") if layer.keep else Text(self.precision.value, "green")
            noise = "" if math.isnan(layer.noise) else f"{layer.noise:.2g}"
            table.add_row(layer.name, layer.kind, runs, noise, layer.reason)
        return table

    def __str__(self) -> str:
        kept = ", ".join(self.keep) or "no layer"
        return f"{self.precision}: keep {kept} of {len(self.layers)} in float32"
