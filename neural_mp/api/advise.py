"""Advice on training, for a model and data that a YAML file names."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from neural_mp.adaptors.registry import require_framework
from neural_mp.api import config_objects
from neural_mp.config import load_settings
from neural_mp.data.user_imports import load_user_object
from neural_mp.errors import ConfigurationError
from neural_mp.training.advice import advise
from neural_mp.training.advice_report import Advice

_KERAS_FILES = (".keras", ".h5", ".hdf5")


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
    """What `neural_mp.training.advise` says of the model and the data of a tuning file.

    Args:
        conf: the file; its calibration data, else its evaluation data, are trained on.
        model: in place of `model.name`: a Keras file, or `module:attribute`.
        loss: the name of a Keras loss, or `module:attribute`; by default what the model was
            compiled with.
        precision: `bf16` or `fp16`.
        steps: how long the run in float32 is.
        limit: how much noise the gradients may have.
        trust: see `MixedPrecision`.

    Raises:
        NeuralMPError: the file, the model, the loss or the data are not what they should be.
    """
    settings = load_settings(conf, trust=trust)
    loader = config_objects.loader(settings, config_objects.CALIBRATION)
    if loader is None:
        loader = config_objects.loader(settings, config_objects.ACCURACY)
    if loader is None:
        raise ConfigurationError(
            f"{conf} names no data; add quantization.calibration.dataloader, whose samples are "
            f"trained on"
        )
    if model is None and settings.model.name is None:
        raise ConfigurationError(f"{conf} names no model; add model.name, or give --model")
    return advise(
        _trained(config_objects.model(settings, model or settings.model.name)),
        loader,
        load_user_object(loss) if loss is not None and ":" in loss else loss,
        precision,
        steps=steps,
        limit=limit,
    )


def _trained(found: object) -> Any:
    """A model that can be trained, of a file or of `module:attribute`."""
    if not isinstance(found, str):
        return found
    if Path(found).suffix not in _KERAS_FILES:
        raise ConfigurationError(
            f"{found!r} is no model that can be trained: give a Keras file "
            f"({', '.join(_KERAS_FILES)}) or module:attribute of your own"
        )
    require_framework("tensorflow", "Keras files")
    from neural_mp.adaptors.tensorflow.keras_models import load

    return load(Path(found), compiled=True)
