"""Origin of non-finite numbers in a model of any framework."""

from __future__ import annotations

import importlib

from neural_mp.adaptors import registry
from neural_mp.adaptors.detect import FRAMEWORKS
from neural_mp.core.numerics_trace import ModelTrace, NonFinite, first_non_finite
from neural_mp.errors import UnknownFrameworkError
from neural_mp.training.device_list import TRAINING_FRAMEWORKS


def first_nonfinite(
    model: object, batch: object, loss: object = None, *, loss_scale: float = 1.0
) -> NonFinite | None:
    """Return the first layer that turns finite numbers into NaN or Inf, forward or backward.

    The model runs in training mode, and its state is restored. For torch, call under the same
    `autocast` as the training.

    Args:
        model: a Keras model or a torch module.
        batch: `(inputs, targets)` or inputs alone.
        loss: the training loss, needed for the backward pass. Keras: a loss, its name, or a
            function of targets and outputs; default: the loss that the model was compiled with.
            torch: a function of outputs and targets.
        loss_scale: the factor applied to the loss in training.

    Returns:
        The origin, with `layer` and `words`; None if all numbers are finite.

    Raises:
        UnknownFrameworkError: the model is neither a Keras model nor a torch module.
        ConfigurationError: the loss is not a loss, or returns more than one number.
        DataError: the batch does not fit the model.
    """
    home = training_home(model)
    passes = importlib.import_module(f"{home}.numerics_trace")
    seen: ModelTrace = passes.model_pass(model, batch, loss, loss_scale)
    return first_non_finite(seen)


def training_home(model: object) -> str:
    """Return the `training` package of the model's adaptor.

    Raises:
        UnknownFrameworkError: the model belongs to no framework with training support.
        MissingFrameworkError: the framework is not installed.
    """
    for name in TRAINING_FRAMEWORKS:
        framework = FRAMEWORKS[name]
        if not isinstance(model, str) and framework.rule.fit(model):
            registry.require_framework(name, f"models of {name}")
            return f"{framework.home}.training"
    raise UnknownFrameworkError(
        f"expected a Keras model or a torch module, got {model!r}"
        if not isinstance(model, type)
        else f"{model.__qualname__} is a class; give an instance of it"
    )
