"""Application of a plan to a model before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from neural_mp.adaptors.registry import training_for
from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.training.advice_report import Advice


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
    _, training = training_for(model)
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
