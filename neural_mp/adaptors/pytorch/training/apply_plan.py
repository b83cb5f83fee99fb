"""Plans on trainable torch modules: wrappers that switch autocast per module."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from neural_mp.adaptors.pytorch.graph.casts import DTYPES
from neural_mp.adaptors.pytorch.training.module_dtypes import RunsIn, remove_plan
from neural_mp.adaptors.pytorch.training.numerics_trace import check_module
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnknownOperatorError, did_you_mean


def apply_plan(model: nn.Module, plan: Mapping[str, Precision]) -> nn.Module:
    """Apply a plan to the modules of a model, in place; others inherit from their parent."""
    check_module(model)
    check_weights(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    for name in plan:
        if name not in modules:
            raise UnknownOperatorError(
                f"the plan names {name!r}, which is not a module of the model"
                f"{did_you_mean(name, filter(None, modules))}"
            )
    chosen = _planned_modules(modules, plan)
    for module in modules.values():
        remove_plan(module)
    low = next((p for p in plan.values() if p.is_16_bit), Precision.FP32)
    whole = plan.get("", low)
    RunsIn(dtype_of(whole), cast_inputs=False, cast_outputs=True).on(model)
    for module, name in chosen.items():
        precision = plan[name]
        if name and precision is not _inherited_precision(name, plan, whole):
            full = precision is Precision.FP32
            # Around a float32 module, autocast converts its outputs as needed; around a 16-bit
            # module, computation is in float32 and may not accept 16-bit outputs.
            RunsIn(dtype_of(precision), cast_inputs=full, cast_outputs=not full).on(module)
    return model


def _planned_modules(
    modules: Mapping[str, nn.Module], plan: Mapping[str, Precision]
) -> dict[nn.Module, str]:
    """Return module → its name in the plan; a shared module has several names."""
    chosen: dict[nn.Module, str] = {}
    for name, precision in plan.items():
        first = chosen.setdefault(modules[name], name)
        if plan[first] is not precision:
            raise ConfigurationError(
                f"the plan must set one precision for {first!r} and {name!r}, which are the same "
                f"module, got {plan[first]} and {precision}"
            )
    return chosen


def check_weights(model: nn.Module) -> None:
    """Raise `ConfigurationError` unless some weights are float32, as mixed precision requires."""
    floats = {p.dtype for p in model.parameters() if p.is_floating_point()}
    if floats and torch.float32 not in floats:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in floats))
        raise ConfigurationError(
            f"weights must be float32 in mixed-precision training, got {names}; call "
            f"model.float() first"
        )


def dtype_of(precision: Precision) -> torch.dtype:
    """Return the torch dtype of BF16, FP16 or FP32."""
    return DTYPES.get(precision, torch.float32)


def _inherited_precision(name: str, plan: Mapping[str, Precision], low: Precision) -> Precision:
    while name:
        name = name.rpartition(".")[0]
        if name in plan:
            return plan[name]
    return low
