"""How long things take: whole models, interleaved, and single ops."""

from neural_mp.profiling.latency import interleaved_medians
from neural_mp.profiling.memory import peak_growth

__all__ = ["interleaved_medians", "peak_growth"]
