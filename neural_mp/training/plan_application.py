"""A plan put on a model that is to be trained."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from neural_mp.core.plan import PrecisionPlan
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError
from neural_mp.training.advice_report import Advice
from neural_mp.training.nonfinite import training_home


def apply_plan(model: object, plan: PrecisionPlan | Advice | str | Path) -> Any:
    """Let a model train as a plan says: some layers in 16 bits, the others in float32.

    Weights stay in float32. A Keras model gets policies, layer by layer, also where it is built or
    compiled already; where a layer is in float16, its optimizer scales the loss. A torch module
    gets hooks, which run it under `torch.autocast` and keep single modules out; its outputs are
    float32, and loss scaling is up to the loop (`GradScaler`). A plan put on before is replaced.

    Args:
        model: a Keras model or a torch module; it is changed in place.
        plan: layer → precision, as `advise` finds it, or its YAML file. A name may be that of a
            layer with layers in it; an entry for one of these counts more. Layers without an
            entry stay as they are in Keras, and go with the others in torch.

    Returns:
        The model.

    Raises:
        UnknownFrameworkError: it is a model of neither.
        UnknownOperatorError: the plan names a layer that the model does not have.
        ConfigurationError: the plan says INT8 of a layer, or BF16 of some and FP16 of others.
        PlanError: the file holds no plan.
    """
    home = training_home(model)
    if isinstance(plan, Advice):
        plan = plan.plan
    elif isinstance(plan, str | Path):
        plan = PrecisionPlan.load(plan)
    if not isinstance(plan, PrecisionPlan):
        raise ConfigurationError(
            f"plan must be what advise gives, a PrecisionPlan or the path of one, got {plan!r}"
        )
    wrong = [name for name, precision in plan.precisions.items() if precision is Precision.INT8]
    if wrong:
        raise ConfigurationError(
            f"the plan says int8 of {wrong[0]!r}; a model is trained in bf16, fp16 and fp32"
        )
    low = {precision for precision in plan.precisions.values() if precision.is_16_bit}
    if len(low) > 1:
        raise ConfigurationError("the plan says bf16 of some layers and fp16 of others; use one")
    applied = importlib.import_module(f"{home}.apply_plan")
    return applied.apply(model, plan.precisions)
