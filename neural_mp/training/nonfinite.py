"""Which layer makes numbers that are not finite, asked of a model of any framework."""

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
    """The layer that turns finite numbers into NaN or Inf: in the forward pass, or backwards.

    The model runs as in training, and is left as it was. For torch, call it under the same
    `autocast` as the training.

    Args:
        model: a Keras model or a torch module.
        batch: `(inputs, targets)` or inputs alone.
        loss: what is trained for, needed to look at the backward pass. Keras: a loss, its name, or
            a function of targets and outputs; by default what the model was compiled with.
            torch: a function of outputs and targets.
        loss_scale: what the loss is multiplied by in training.

    Returns:
        Where it happens, with `layer` and `words`; None where all numbers are finite.

    Raises:
        UnknownFrameworkError: it is a model of neither.
        ConfigurationError: the loss is none, or gives more than one number.
        DataError: the batch does not fit the model.
    """
    home = training_home(model)
    passes = importlib.import_module(f"{home}.numerics_trace")
    seen: ModelTrace = passes.model_pass(model, batch, loss, loss_scale)
    return first_non_finite(seen)


def training_home(model: object) -> str:
    """The package that knows how models such as this one are trained.

    Raises:
        UnknownFrameworkError: it is no model that is trained in a framework known here.
        MissingFrameworkError: the framework is not installed.
    """
    for name in TRAINING_FRAMEWORKS:
        framework = FRAMEWORKS[name]
        if not isinstance(model, str) and framework.marks.fit(model):
            registry.require_framework(name, f"models of {name}")
            return f"{framework.home}.training"
    raise UnknownFrameworkError(
        f"expected a Keras model or a torch module, got {model!r}"
        if not isinstance(model, type)
        else f"{model.__qualname__} is a class; give an instance of it"
    )
