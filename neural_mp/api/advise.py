"""Training advice for the model and data of a tuning file."""

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
    """Run `neural_mp.training.advise` on the model and data of a tuning file.

    Args:
        conf: the tuning file; training uses its calibration data, else its evaluation data.
        model: replaces `model.name`: a Keras file or `module:attribute`.
        loss: name of a Keras loss or `module:attribute`; default: the loss of the compiled model.
        precision: `bf16` or `fp16`.
        steps: training steps in float32.
        limit: upper bound of the gradient NSR.
        trust: see `MixedPrecision`.

    Raises:
        NeuralMPError: the file, the model, the loss or the data are invalid.
    """
    settings = load_settings(conf, trust=trust)
    loader = config_objects.any_loader(settings, conf)
    if model is None and settings.options.model is None:
        raise ConfigurationError(
            f"{conf} must name a model, got none; add model.name, or give --model"
        )
    return advise(
        _load_trainable_model(config_objects.model(settings, model or settings.options.model)),
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
    from neural_mp.adaptors.tensorflow.capture.keras_models import load

    return load(Path(source), compiled=True)
