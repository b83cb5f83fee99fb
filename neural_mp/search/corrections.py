"""What is known of the harm of storing a tensor in INT8, and what repairs make of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median

from neural_mp.core.enums import Approach
from neural_mp.core.observations import Observations
from neural_mp.core.plan import PrecisionPlan
from neural_mp.space import TuningSpace

#: A repair has to take this share of a tensor's noise away to be worth it.
_MIN_NSR_REDUCTION = 0.5


def best_corrections(observations: Observations) -> dict[str, str]:
    """Tensor → the repair that leaves least noise, where one takes away half of it or more."""
    found = {}
    for tensor, noise in observations.corrected_nsr.items():
        best = min(noise, key=lambda repair: noise[repair])
        if noise[best] <= (1 - _MIN_NSR_REDUCTION) * observations.nsr.get(tensor, 0.0):
            found[tensor] = best
    return found


def with_corrections(
    plan: PrecisionPlan, space: TuningSpace, repairs: Mapping[str, str]
) -> PrecisionPlan:
    """A plan whose INT8 ops have the tensors they read repaired.

    Args:
        plan: the plan.
        space: what every op may run in.
        repairs: tensor → repair.
    """
    changes = {}
    for tensor in space.tensors:
        if tensor.name in repairs:
            for op in tensor.consumers:
                if op in plan and plan[op].approach is Approach.STATIC:
                    changes[op] = replace(plan[op], corrections=(repairs[tensor.name],))
    return plan.replacing(changes)


def corrected_nsr(observations: Observations, repairs: Mapping[str, str]) -> dict[str, float]:
    """Tensor → its noise-to-signal ratio, with these of the tensors repaired."""
    mended = {
        tensor: observations.corrected_nsr[tensor][repair] for tensor, repair in repairs.items()
    }
    return {**observations.nsr, **mended}


def rescale_estimates(noise: Mapping[str, float], exact: Mapping[str, float]) -> dict[str, float]:
    """Estimates of all tensors beside what was measured exactly of a few.

    The two are in different units: the noise of a tensor by itself, and what of it arrives at the
    outputs. What was not measured is taken to arrive like the middle of what was.

    Args:
        noise: tensor → estimate.
        exact: tensor → measured, of some of them.
    """
    arriving = [exact[name] / noise[name] for name in exact if noise.get(name, 0.0) > 0]
    share = median(arriving) if arriving else 1.0
    return {name: exact.get(name, value * share) for name, value in noise.items()}
