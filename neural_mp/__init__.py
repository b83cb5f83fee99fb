"""Tune a trained model's precisions: the fastest model that meets an accuracy target.

>>> from neural_mp import MixedPrecision, common
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from neural_mp.util.lazy_exports import make_lazy_getter
from neural_mp.util.text import show_by

if TYPE_CHECKING:
    from neural_mp import common
    from neural_mp.amp.options import AutoMixedPrecisionOptions
    from neural_mp.api.compare import compare
    from neural_mp.api.foreign_configs import quantize_
    from neural_mp.api.input_data import calibration
    from neural_mp.api.mixed_precision import MixedPrecision
    from neural_mp.api.optimized_model import OptimizedModel
    from neural_mp.api.replay import convert_with_plan
    from neural_mp.core.criterion import AccuracyCriterion, ExitPolicy
    from neural_mp.core.plan import PrecisionPlan
    from neural_mp.core.precision import Precision
    from neural_mp.errors import NeuralMPError
    from neural_mp.io.limits import trusting
    from neural_mp.jobs import tune_many
    from neural_mp.tasks.task_model import load
    from neural_mp.tasks.tuning import tune_folder
    from neural_mp.tuning.measurement.comparison import Comparison
    from neural_mp.util.verbosity import (
        disable_progress_bars,
        enable_progress_bars,
        set_verbosity,
    )

__version__: str

#: Public name → its module, imported on first access to keep `import neural_mp` fast.
_LAZY = {
    "AccuracyCriterion": "neural_mp.core.criterion",
    "AutoMixedPrecisionOptions": "neural_mp.amp.options",
    "ExitPolicy": "neural_mp.core.criterion",
    "MixedPrecision": "neural_mp.api.mixed_precision",
    "NeuralMPError": "neural_mp.errors",
    "OptimizedModel": "neural_mp.api.optimized_model",
    "Precision": "neural_mp.core.precision",
    "PrecisionPlan": "neural_mp.core.plan",
    "Comparison": "neural_mp.tuning.measurement.comparison",
    "calibration": "neural_mp.api.input_data",
    "compare": "neural_mp.api.compare",
    "convert_with_plan": "neural_mp.api.replay",
    "disable_progress_bars": "neural_mp.util.verbosity",
    "enable_progress_bars": "neural_mp.util.verbosity",
    "load": "neural_mp.tasks.task_model",
    "quantize_": "neural_mp.api.foreign_configs",
    "set_verbosity": "neural_mp.util.verbosity",
    "trusting": "neural_mp.io.limits",
    "tune_folder": "neural_mp.tasks.tuning",
    "tune_many": "neural_mp.jobs",
}

_exported = make_lazy_getter(__name__, _LAZY)

show_by("neural_mp.reporting.displays")

__all__ = [
    "AccuracyCriterion",
    "AutoMixedPrecisionOptions",
    "Comparison",
    "ExitPolicy",
    "MixedPrecision",
    "NeuralMPError",
    "OptimizedModel",
    "Precision",
    "PrecisionPlan",
    "calibration",
    "common",
    "compare",
    "convert_with_plan",
    "disable_progress_bars",
    "enable_progress_bars",
    "load",
    "quantize_",
    "set_verbosity",
    "trusting",
    "tune_folder",
    "tune_many",
]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from neural_mp.util.system.environment import read_package_versions

        return read_package_versions(["neural-mp"]).get("neural-mp", "unknown: not installed")
    if name == "common":
        return importlib.import_module("neural_mp.common")
    return _exported(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
