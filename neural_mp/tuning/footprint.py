"""How much memory the run of a model takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from neural_mp.adaptors.loaded_model import AnyModel, AnyTunableModel
from neural_mp.core.plan import PrecisionPlan
from neural_mp.space import ResolvedPlan, live_bytes


@dataclass(frozen=True, eq=False)
class Footprints:
    """Tells what a model and its converted forms take in memory, the same on every call.

    Attributes:
        model: the FP32 model.
        inputs: one batch.
    """

    model: AnyTunableModel
    inputs: Any

    def __call__(self, candidate: AnyModel, plan: ResolvedPlan) -> int:
        """Bytes of a candidate's weights, and of its activations at their most.

        Args:
            candidate: the model.
            plan: what it runs in.
        """
        return candidate.size + live_bytes(self.model.space, plan, self.values)

    @cached_property
    def baseline(self) -> int:
        """Bytes of the FP32 model."""
        return self(self.model, self.model.space.resolve(PrecisionPlan()))

    @cached_property
    def values(self) -> Mapping[str, float]:
        """Op or graph input → how many numbers it holds in a run of the batch."""
        return self.model.tensor_values(self.inputs)
