"""Drop-in API for scripts written for Intel Neural Compressor (INC).

Either change one import, `from neural_mp.compat.inc.experimental import Quantization, common`, or
none and run `python -m neural_mp.compat.inc script.py`.
"""

from __future__ import annotations

import importlib
from typing import Any

from neural_mp.compat.inc.import_aliases import HERE, make_absent_getter, register

#: Module → names that are defined there.
_MODULES = {
    "config": (
        "AccuracyCriterion",
        "BenchmarkConfig",
        "MixedPrecisionConfig",
        "PostTrainingQuantConfig",
        "QuantizationAwareTrainingConfig",
        "TuningCriterion",
    ),
    "metric": ("METRICS", "Metric", "BaseMetric"),
    "model": ("Model",),
    "user_objects": ("conf",),
    "utils": ("options", "set_random_seed", "set_workspace"),
    "experimental": ("MixedPrecision",),
    "top_level": ("Quantization", "Benchmark"),
    **dict.fromkeys(("benchmark", "data", "mix_precision", "quantization", "training"), ()),
}
_NAMES = {name: module for module, names in _MODULES.items() for name in names}

#: Latest INC version whose API is provided.
__version__ = "2.2"


def __getattr__(name: str) -> Any:
    if name in _NAMES:
        return getattr(importlib.import_module(f"{HERE}.{_NAMES[name]}"), name)
    if name in _MODULES:
        return importlib.import_module(f"{HERE}.{name}")
    return make_absent_getter({**_NAMES, "__name__": __name__})(name)


register(HERE)
