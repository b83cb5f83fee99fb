"""How long things take: whole models, interleaved, and single ops."""

from neural_mp.profiling.latency import (
    Ratio,
    interleaved_medians,
    interleaved_rounds,
    ratio,
    undisturbed,
)
from neural_mp.profiling.memory import peak_growth

__all__ = [
    "Ratio",
    "interleaved_medians",
    "interleaved_rounds",
    "peak_growth",
    "ratio",
    "undisturbed",
]
