"""Mixed precision while a model is trained, and in programs that are not converted."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from neural_mp.adaptors import registry

if TYPE_CHECKING:
    from neural_mp.adaptors.pytorch.training.autocast import autocast
    from neural_mp.adaptors.pytorch.training.grad_scaler import GradScaler
    from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
    from neural_mp.core.loss_scale import LossScale
    from neural_mp.training.tensorflow_rewrite import (
        disable_graph_rewrite,
        enable_graph_rewrite,
        graph_rewrite,
    )

_PYTORCH = "neural_mp.adaptors.pytorch.training"
_TENSORFLOW = "neural_mp.adaptors.tensorflow.training"

#: Public name → the framework it needs, if any, and the module it lives in, which is imported when
#: it is first asked for.
_LAZY = {
    "GradScaler": ("pytorch", f"{_PYTORCH}.grad_scaler"),
    "LossScale": (None, "neural_mp.core.loss_scale"),
    "LossScaleOptimizer": ("tensorflow", f"{_TENSORFLOW}.loss_scale_optimizer"),
    "autocast": ("pytorch", f"{_PYTORCH}.autocast"),
    "disable_graph_rewrite": (None, "neural_mp.training.tensorflow_rewrite"),
    "enable_graph_rewrite": (None, "neural_mp.training.tensorflow_rewrite"),
    "graph_rewrite": (None, "neural_mp.training.tensorflow_rewrite"),
}

__all__ = [
    "GradScaler",
    "LossScale",
    "LossScaleOptimizer",
    "autocast",
    "disable_graph_rewrite",
    "enable_graph_rewrite",
    "graph_rewrite",
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
