"""Benchmark of several models in interleaved runs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from neural_mp.adaptors.loaded_model import AnyModel
from neural_mp.api.loading import load_source
from neural_mp.api.optimized_model import load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.profiling import interleaved_rounds, ratio, uncontended
from neural_mp.reporting.tables import BenchmarkRow
from neural_mp.util.pytree import batch_size_of


def benchmark_models(
    sources: Sequence[str],
    batch_size: int | None = None,
    warmup: int = 5,
    iterations: int = 50,
    inputs: object = None,
) -> list[BenchmarkRow]:
    """Measure latency and size of models and saved results in interleaved rounds.

    Args:
        sources: models, saved results or `module:attribute`, in any mix.
        batch_size: samples per batch; default: as in the example inputs.
        warmup: warm-up rounds.
        iterations: measured rounds.
        inputs: inputs of all models; default: the example inputs of the first model file.

    Raises:
        ModelLoadError: a source cannot be loaded.
    """
    models = [_load_any(source, inputs) for source in sources]
    # All models run the same batch; inputs stored in a file are more reliable than guessed inputs.
    stored = [entry for entry, source in zip(models, sources, strict=True) if Path(source).exists()]
    model = models[0] if inputs is not None or not stored else stored[0]
    batch = model.example_inputs(batch_size)
    runs = [partial(model, batch) for model in models]
    rounds = interleaved_rounds(runs, warmup=warmup, iterations=iterations)
    return [
        BenchmarkRow(
            str(source),
            uncontended(seconds),
            batch_size_of(batch),
            model.size,
            ratio(seconds, rounds[0]).inverse,
        )
        for source, seconds, model in zip(sources, rounds, models, strict=True)
    ]


def _load_any(source: str, inputs: object) -> AnyModel:
    return load(source).loaded if is_saved_model(source) else load_source(source, None, inputs)
