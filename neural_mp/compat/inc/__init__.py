"""Drop-in API for scripts written for Intel Neural Compressor (INC).

Either change one import, `from neural_mp.compat.inc.experimental import Quantization, common`, or
none and run `python -m neural_mp.compat.inc script.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

from neural_mp.compat.inc.import_aliases import looked_up

_HERE = "neural_mp.compat.inc"
#: Name → module that defines the name; the module itself if the name is empty.
_NAMES = {
    "AccuracyCriterion": "config",
    "BenchmarkConfig": "config",
    "MixedPrecisionConfig": "config",
    "PostTrainingQuantConfig": "config",
    "TuningCriterion": "config",
    "METRICS": "metric",
    "Metric": "metric",
    "BaseMetric": "metric",
    "Model": "model",
    "conf": "user_objects",
    "options": "utils",
    "set_random_seed": "utils",
    "set_workspace": "utils",
    "Quantization": "experimental",
    "MixedPrecision": "experimental",
    "Benchmark": "experimental",
}
_MODULES = (
    *("benchmark", "config", "data", "experimental", "metric", "mix_precision", "model"),
    "quantization",
)


#: Latest INC version whose API is provided.
__version__ = "2.2"


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{_HERE}.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{_HERE}.{name}")
    if name == "utils":
        return importlib.import_module(f"{_HERE}.utils")
    return looked_up(__name__, name, _NAMES)


def _with_their_paths() -> None:
    from neural_mp.compat.inc.import_aliases import HERE, register

    register(HERE)


_with_their_paths()
