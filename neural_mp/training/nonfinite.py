"""Origin of non-finite numbers in a model of any framework."""

from __future__ import annotations

from neural_mp.adaptors.registry import training_for
from neural_mp.core.numerics_trace import NonFinite, first_non_finite


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
    _, training = training_for(model)
    return first_non_finite(training.trace_numerics(model, batch, loss, loss_scale))
