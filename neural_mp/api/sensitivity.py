"""The decisions of a model that is named, measured on data that are named."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from neural_mp.api.input_data import DEFAULT_SAMPLES, batches_of
from neural_mp.api.loading import load_source
from neural_mp.api.mixed_precision import MixedPrecision
from neural_mp.api.optimized_model import load
from neural_mp.api.saved_model import is_saved_model
from neural_mp.io.trust import trusting
from neural_mp.tuning.listener import Listener
from neural_mp.tuning.sensitivity import SensitivityReport


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
    """What every decision of a model costs and gains.

    Args:
        model: a model file, or `module:attribute`; a tuning file, with its model, data and limits;
            or a saved result, of which its run is asked.
        data: an `.npy` or `.npz` file or a tuning file to calibrate with; one batch of random
            inputs by default.
        precisions: what is looked at; what tuning tries by default.
        samples: how many samples are run.
        batch_size: of data in arrays.
        most: how many decisions are measured at the outputs; all by default.
        framework: where it is not found by itself.
        inputs: example inputs of a model that comes without any.
        listener: receives the progress.
        trust: see `MixedPrecision`.

    Raises:
        NeuralMPError: the model or the data cannot be read, or do not fit.
    """
    if is_saved_model(model):
        with trusting(trust):
            return load(model).sensitivity()
    if Path(model).suffix in (".yaml", ".yml"):
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
