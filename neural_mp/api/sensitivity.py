"""Sensitivity of the decisions of a model given by name."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from neural_mp.api.input_data import DEFAULT_SAMPLES, TUNING_FILES, batches_of
from neural_mp.api.loading import load_source
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.api.optimized_model import load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.errors import UnknownPrecisionError
from neural_mp.io.trust import trusting
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.measurement.sensitivity import SensitivityReport


def sensitivity_of(
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

    Args:
        model: a model file or `module:attribute`; a tuning file with model, data and constraints;
            or a saved result, whose run record is used.
        data: an `.npy`, `.npz` or `.csv` file or a tuning file for calibration; default: one batch
            of random inputs.
        precisions: precisions to consider; default: as in tuning.
        samples: number of samples to run.
        batch_size: samples per batch of an array.
        most: number of decisions to measure at the outputs; default: all.
        framework: framework of the model; default: detected.
        inputs: example inputs for a model without any.
        listener: receives the progress.
        trust: see `MixedPrecision`.

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
        converter.calib_dataloader = batches_of(data, batch_size, samples, trust)
    if precisions:
        converter.precisions = ",".join(precisions)
    converter.sampling_size = samples
    converter.listener = listener
    return converter.sensitivity(most)
