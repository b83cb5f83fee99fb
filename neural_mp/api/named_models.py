"""Sensitivity, benchmark and training advice of models given by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from neural_mp.adaptors.registry import require_framework
from neural_mp.api import config_objects
from neural_mp.api.input_data import DEFAULT_SAMPLES, read_file_batches
from neural_mp.api.loading import load_source
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.api.optimized_model import load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.config import load_settings
from neural_mp.config.source import TUNING_FILES
from neural_mp.data.user_imports import load_user_object
from neural_mp.errors import ConfigurationError, UnknownPrecisionError
from neural_mp.io.limits import trusting
from neural_mp.profiling import (
    estimate_latency_ratio,
    estimate_uncontended_latency,
    time_interleaved_rounds,
)
from neural_mp.reporting.tables import BenchmarkRow
from neural_mp.training.advice import Advice, advise
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement.sensitivity import SensitivityReport
from neural_mp.util.pytree import batch_size_of

_KERAS_FILES = (".keras", ".h5", ".hdf5")


def measure_model_sensitivity(
    model: str,
    data: str | Path | None = None,
    *,
    precisions: Sequence[str] = (),
    samples: int = DEFAULT_SAMPLES,
    batch_size: int | None = None,
    most: int | None = None,
    framework: str | None = None,
    inputs: object = None,
    listener: Listener | None = None,
    trust: Iterable[str] = (),
) -> SensitivityReport:
    """Measure the sensitivity and the gain of each decision of a model.

    `model` is a model file or `module:attribute`; a tuning file with model, data and constraints;
    or a saved result, whose run record is used. `data` is an `.npy`, `.npz`, `.csv` or tuning file
    for calibration, by default one batch of random inputs. Only the outputs of `most` decisions are
    measured.

    Raises:
        NeuralMPError: the model or the data cannot be read, or do not fit.
    """
    if "fp32" in precisions:
        raise UnknownPrecisionError(
            "precisions must be below fp32, with which they are compared, e.g. int8 or bf16, got "
            "fp32"
        )
    if is_saved_model(model):
        with trusting(trust):
            return load(model).sensitivity()
    if Path(model).suffix in TUNING_FILES:
        converter = MixedPrecision(model, trust=trust)
    else:
        converter = MixedPrecision(model=model, framework=framework, inputs=inputs, trust=trust)
        if data is None:
            example = inputs
            if example is None:
                loaded = load_source(model, framework, None, trust=trust)
                example = loaded.example_inputs(batch_size)
            converter.calib_dataloader = [(example, None)]
    if data is not None:
        converter.calib_dataloader = read_file_batches(data, batch_size, samples, trust)
    if precisions:
        converter.precisions = ",".join(precisions)
    converter.sampling_size = samples
    converter.listener = listener
    return converter.sensitivity(most)


def benchmark_models(
    sources: Sequence[str],
    batch_size: int | None = None,
    warmup: int = 5,
    iterations: int = 50,
    inputs: object = None,
) -> list[BenchmarkRow]:
    """Measure latency and size of models and saved results in interleaved rounds.

    The default inputs are the example inputs of the first model file.

    Raises:
        ModelLoadError: a source cannot be loaded.
    """
    models = [
        load(source).loaded if is_saved_model(source) else load_source(source, None, inputs)
        for source in sources
    ]
    # All models run the same batch; inputs stored in a file are more reliable than guessed inputs.
    stored = [entry for entry, source in zip(models, sources, strict=True) if Path(source).exists()]
    model = models[0] if inputs is not None or not stored else stored[0]
    batch = model.example_inputs(batch_size)
    runs = [partial(model, batch) for model in models]
    rounds = time_interleaved_rounds(runs, warmup=warmup, iterations=iterations)
    return [
        BenchmarkRow(
            str(source),
            estimate_uncontended_latency(seconds),
            batch_size_of(batch),
            model.size,
            estimate_latency_ratio(seconds, rounds[0]).inverse,
        )
        for source, seconds, model in zip(sources, rounds, models, strict=True)
    ]


def advise_from_file(
    conf: Path,
    model: str | None = None,
    loss: str | None = None,
    precision: str = "bf16",
    *,
    steps: int = 100,
    limit: float = 0.01,
    trust: Iterable[str] = (),
) -> Advice:
    """Run `neural_mp.training.advise` on the model and data of a tuning file.

    Training uses the calibration data of the file, else its evaluation data. `model` replaces
    `model.name`: a Keras file or `module:attribute`. `loss` is the name of a Keras loss or
    `module:attribute`; by default, the loss of the compiled model.

    Raises:
        NeuralMPError: the file, the model, the loss or the data are invalid.
    """
    settings = load_settings(conf, trust=trust)
    loader = config_objects.build_any_loader(settings, conf)
    if model is None and settings.options.model is None:
        raise ConfigurationError(
            f"{conf} must name a model, got none; add model.name, or give --model"
        )
    return advise(
        _load_trainable_model(
            config_objects.build_model(settings, model or settings.options.model)
        ),
        loader,
        load_user_object(loss) if loss is not None and ":" in loss else loss,
        precision,
        steps=steps,
        limit=limit,
    )


def _load_trainable_model(source: object) -> Any:
    if not isinstance(source, str):
        return source
    if Path(source).suffix not in _KERAS_FILES:
        raise ConfigurationError(
            f"the model must be a Keras file ({', '.join(_KERAS_FILES)}) or module:attribute, got "
            f"{source!r}"
        )
    require_framework("tensorflow", "Keras files")
    from neural_mp.adaptors.tensorflow.capture.keras_models import (
        load_keras_file as load_keras_model,
    )

    return load_keras_model(Path(source), compiled=True)
