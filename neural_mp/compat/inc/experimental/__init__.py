"""`neural_compressor.experimental` of version 1: `Quantization`, `MixedPrecision`, `Benchmark`."""

from __future__ import annotations

from typing import Any

from neural_mp.compat.inc.absent import looked_up
from neural_mp.compat.inc.experimental import common
from neural_mp.compat.inc.experimental.benchmark import Benchmark
from neural_mp.compat.inc.experimental.tuning import (
    GraphOptimization,
    MixedPrecision,
    Quantization,
)

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
