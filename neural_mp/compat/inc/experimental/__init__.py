"""`neural_compressor.experimental` of version 1: `Quantization`, `MixedPrecision`, `Benchmark`."""

from __future__ import annotations

from typing import Any

from neural_mp.compat.inc.experimental import common
from neural_mp.compat.inc.experimental.facade import (
    Benchmark,
    GraphOptimization,
    MixedPrecision,
    Quantization,
)
from neural_mp.compat.inc.import_aliases import looked_up

Graph_Optimization = GraphOptimization

__all__ = [
    "Benchmark",
    "GraphOptimization",
    "Graph_Optimization",
    "MixedPrecision",
    "Quantization",
    "common",
]


def __getattr__(name: str) -> Any:
    return looked_up(__name__, name, globals())
