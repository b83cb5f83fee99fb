"""Noise of a plan's results before and after its weights recover accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from neural_mp.util.json_fields import Count, JsonFields, NonNegative
from neural_mp.util.string_enum import StringEnum


class Stage(StringEnum):
    """Origin of the weights of a plan."""

    NEAREST = "nearest"  #: rounded to nearest, with the corrections that are not learned
    RECONSTRUCTED = "reconstructed"  #: learned from FP32's results, layer by layer
    TRAINED = "trained"  #: trained with the rounding of the plan


#: Stage → heading.
STAGE_WORDS: Mapping[Stage, str] = {
    Stage.NEAREST: "rounded to nearest",
    Stage.RECONSTRUCTED: "after reconstruction",
    Stage.TRAINED: "after training",
}


@dataclass(frozen=True)
class StageNoise(JsonFields):
    """NSR against FP32 of one plan with the weights of each stage, on calibration samples.

    Attributes:
        ops: op of the plan → stage → NSR of its result, or of the result of the kernel that the op
            is fused into.
        outputs: stage → NSR of the noisiest output.
        samples: number of calibration samples.
    """

    ops: Mapping[str, Mapping[str, NonNegative]]
    outputs: Mapping[str, NonNegative]
    samples: Count

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages that were measured, in order."""
        return tuple(stage for stage in Stage if stage.value in self.outputs)

    def noisiest(self, count: int) -> dict[str, Mapping[str, float]]:
        """Return the ops that are noisiest when rounded to nearest, in the order of the model."""
        ranked = sorted(self.ops, key=lambda op: -self.ops[op].get(Stage.NEAREST.value, 0.0))
        chosen = set(ranked[:count])
        return {op: by for op, by in self.ops.items() if op in chosen}
