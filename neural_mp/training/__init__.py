"""Mixed-precision and quantization-aware training, and mixed precision without conversion."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from neural_mp.adaptors import registry

if TYPE_CHECKING:
    from neural_mp.adaptors.common.simulation import OptimizerChoice
    from neural_mp.adaptors.pytorch.training.autocast import autocast
    from neural_mp.adaptors.pytorch.training.grad_scaler import GradScaler
    from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
    from neural_mp.adaptors.tensorflow.training.watch import Watch
    from neural_mp.core.training_numerics import LossScale
    from neural_mp.training.advice import (
        advise,
        apply_plan,
        devices,
        first_nonfinite,
        is_gpu_available,
    )
    from neural_mp.training.loop import TrainingProgress, fit
    from neural_mp.training.policies import (
        disable_graph_rewrite,
        disable_mixed_precision_graph_rewrite,
        enable_graph_rewrite,
        enable_mixed_precision_graph_rewrite,
        graph_rewrite,
        kept_layers,
        set_policy,
        supported_policies,
    )

_PYTORCH = "neural_mp.adaptors.pytorch.training"
_TENSORFLOW = "neural_mp.adaptors.tensorflow.training"

#: Public name → required framework, if any, and module. Imported on first access, so that no
#: framework is imported without need. Functions that return results of the API are of that
#: package, which no other may import.
_LAZY = {
    "GradScaler": ("pytorch", f"{_PYTORCH}.grad_scaler"),
    "LossScale": (None, "neural_mp.core.training_numerics"),
    "LossScaleOptimizer": ("tensorflow", f"{_TENSORFLOW}.loss_scale_optimizer"),
    "Watch": ("tensorflow", f"{_TENSORFLOW}.watch"),
    "advise": (None, "neural_mp.training.advice"),
    "apply_plan": (None, "neural_mp.training.advice"),
    "devices": (None, "neural_mp.training.advice"),
    "autocast": ("pytorch", f"{_PYTORCH}.autocast"),
    "disable_graph_rewrite": (None, "neural_mp.training.policies"),
    "disable_mixed_precision_graph_rewrite": (None, "neural_mp.training.policies"),
    "enable_graph_rewrite": (None, "neural_mp.training.policies"),
    "finish": (None, "neural_mp.api.quantization_aware"),
    "OptimizerChoice": (None, "neural_mp.adaptors.common.simulation"),
    "TrainingProgress": (None, "neural_mp.training.loop"),
    "fit": (None, "neural_mp.training.loop"),
    "first_nonfinite": (None, "neural_mp.training.advice"),
    "enable_mixed_precision_graph_rewrite": (None, "neural_mp.training.policies"),
    "graph_rewrite": (None, "neural_mp.training.policies"),
    "is_gpu_available": (None, "neural_mp.training.advice"),
    "kept_layers": (None, "neural_mp.training.policies"),
    "quantization_aware": (None, "neural_mp.api.quantization_aware"),
    "set_policy": (None, "neural_mp.training.policies"),
    "supported_policies": (None, "neural_mp.training.policies"),
}

__all__ = [
    "GradScaler",
    "LossScale",
    "LossScaleOptimizer",
    "OptimizerChoice",
    "TrainingProgress",
    "Watch",
    "advise",
    "apply_plan",
    "autocast",
    "devices",
    "disable_graph_rewrite",
    "disable_mixed_precision_graph_rewrite",
    "enable_graph_rewrite",
    "enable_mixed_precision_graph_rewrite",
    "finish",
    "first_nonfinite",
    "fit",
    "graph_rewrite",
    "is_gpu_available",
    "kept_layers",
    "quantization_aware",
    "set_policy",
    "supported_policies",
]


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        framework, home = _LAZY[name]
        if framework is not None:
            registry.require_framework(framework, f"users of {name}")
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module 'neural_mp.training' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
