"""Plans between two neighbouring corners of the Pareto front.

A minimum cut finds the corners of the front's convex hull only. Tensors of similar noise per saved
time move together from one corner to the next, which may be most of the model.
"""

from __future__ import annotations

from collections.abc import Sequence

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizedTensor
from neural_mp.core.trial import Trial
from neural_mp.search.cost_model import CostModel, without_tensors
from neural_mp.space import TuningSpace
from neural_mp.strategies.refinement import low_ops


def halfway(
    space: TuningSpace,
    model: CostModel,
    trials: Sequence[Trial],
    tensors: Sequence[QuantizedTensor],
) -> PrecisionPlan | None:
    """Return a plan between the fastest trial that met the target and the closest that missed it.

    Of the tensors that separate the two, the first half falls back.

    Args:
        space: the space.
        model: predicts the time of plans.
        trials: all trials so far.
        tensors: all tensors, first to fall back first.

    Returns:
        The plan; None without two such trials and two such tensors, or if the plan is not expected
        to be faster than the trial that met the target.
    """
    accurate = [trial.plan for trial in trials if trial.meets_accuracy]
    if not accurate:
        return None
    met = min(accurate, key=lambda plan: model.cost(plan)[0])
    wider = [t.plan for t in trials if not t.meets_accuracy and low_ops(met) < low_ops(t.plan)]
    if not wider:
        return None
    missed = min(wider, key=lambda plan: len(low_ops(plan)))
    between = [t for t in tensors if _in_int8(missed, t) and not _in_int8(met, t)]
    plan = without_tensors(space, missed, between[: len(between) // 2])
    faster = model.cost(plan)[0] < model.cost(met)[0]
    return plan if faster and len(between) > 1 else None


def _in_int8(plan: PrecisionPlan, tensor: QuantizedTensor) -> bool:
    return any(plan[op].precision is Precision.INT8 for op in tensor.quantizing_ops)
