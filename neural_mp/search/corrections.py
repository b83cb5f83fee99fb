"""Quantization noise of tensors before and after corrections, and the choice of corrections."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from statistics import median

from neural_mp.core.enums import Approach, CalibrationAlgorithm
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import RECONSTRUCTIONS, OpConfig
from neural_mp.space import TuningSpace

#: A correction must remove at least this fraction of a tensor's noise.
_MIN_NSR_REDUCTION = 0.5


def choose_best_corrections(observations: Observations) -> dict[str, str]:
    """Return tensor → the correction with the least NSR, if its noise is at least halved."""
    corrections = {}
    for tensor, noise in observations.corrected_nsr.items():
        best = min(noise, key=noise.__getitem__)
        if noise[best] <= (1 - _MIN_NSR_REDUCTION) * observations.nsr.get(tensor, 0.0):
            corrections[tensor] = best
    return corrections


def with_corrections(
    plan: PrecisionPlan, space: TuningSpace, corrections: Mapping[str, str]
) -> PrecisionPlan:
    """Return a plan whose INT8 ops read corrected tensors; `corrections`: tensor → correction."""
    changes = {}
    for tensor in space.tensors:
        if tensor.name in corrections:
            for op in tensor.consumers:
                if op in plan and plan[op].approach is Approach.STATIC:
                    changes[op] = replace(plan[op], corrections=(corrections[tensor.name],))
    return plan.replacing(changes)


@dataclass(frozen=True)
class Int8Settings:
    """Settings of static INT8 ops beyond their best configs.

    Attributes:
        algorithm: calibration algorithm of the activations; None for that of the configs.
        bias_correction: whether corrected ops get a corrected bias.
        learned: the ops with learned weights.
    """

    algorithm: CalibrationAlgorithm | None = None
    bias_correction: bool = False
    learned: frozenset[str] = frozenset()

    def apply_to_plan(self, plan: PrecisionPlan, space: TuningSpace) -> PrecisionPlan:
        """Return a plan with these settings, as far as the ops support them."""
        return plan.replacing(
            {
                op: self._apply_to_op(op, config, space)
                for op, config in plan.items()
                if config.approach is Approach.STATIC and config.activation is not None
            }
        )

    def _apply_to_op(self, op: str, config: OpConfig, space: TuningSpace) -> OpConfig:
        result = config
        if self.algorithm is not None and config.activation is not None:
            spec = replace(config.activation, algorithm=self.algorithm)
            changed = replace(config, activation=spec)
            supported = replace(changed, corrections=()) in space.capabilities[op].configs
            result = changed if supported else config
        names = result.corrections
        if op in self.learned:
            names = (*names, "bias_correction", *RECONSTRUCTIONS)
        elif self.bias_correction and names:
            names = (*names, "bias_correction")
        return replace(result, corrections=names)


def without_reconstruction(
    plan: PrecisionPlan, names: Collection[str] = RECONSTRUCTIONS
) -> PrecisionPlan:
    """Return a plan of the same speed without some corrections of the ops with learned weights."""
    return plan.replacing(
        {
            op: replace(config, corrections=tuple(n for n in config.corrections if n not in names))
            for op, config in plan.items()
            if config.is_reconstructed
        }
    )


def apply_correction_nsr(
    observations: Observations, corrections: Mapping[str, str]
) -> dict[str, float]:
    """Return tensor → its NSR after the given corrections."""
    corrected = {tensor: observations.corrected_nsr[tensor][c] for tensor, c in corrections.items()}
    return {**observations.nsr, **corrected}


def rescale_noise_estimates(
    noise: Mapping[str, float], exact: Mapping[str, float]
) -> dict[str, float]:
    """Rescale the noise estimates of all tensors to the exact measurements of a few.

    The units differ: estimates are the noise of single tensors, measurements the resulting noise at
    the outputs. Unmeasured tensors are scaled by the median ratio of the measured ones.
    """
    ratios = [exact[name] / noise[name] for name in exact if noise.get(name, 0.0) > 0]
    ratio = median(ratios) if ratios else 1.0
    return {name: exact.get(name, estimate * ratio) for name, estimate in noise.items()}
