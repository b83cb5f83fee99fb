"""Losses and optimizers of Keras by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from neural_mp.adaptors.common.training_choices import (
    BY_OUTPUT,
    SPARSE_CROSS_ENTROPY,
    SQUARED_ERROR,
    LossChoice,
    OptimizerChoice,
    are_class_numbers,
    check_targets,
)
from neural_mp.adaptors.tensorflow.training.simulated_model import SimulatedModel
from neural_mp.errors import ConfigurationError

_KINDS = {
    "SGD": keras.optimizers.SGD,
    "Adam": keras.optimizers.Adam,
    "AdamW": keras.optimizers.AdamW,
}


def chosen_loss(choice: LossChoice) -> Callable[[Any, Any], Any]:
    """Return a loss as a function of targets and outputs.

    Of cross-entropy, targets such as [n] or [n, 1] are class numbers, others distributions; the
    other losses read one target for each output.
    """
    losses = partial(_by_output if choice.name in BY_OUTPUT else _by_class, choice)

    def loss(targets: Any, outputs: Any) -> tf.Tensor:
        values = losses(targets, outputs)
        return tf.reduce_sum(values) if choice.sums else tf.reduce_mean(values)

    return loss


def _by_class(choice: LossChoice, targets: Any, outputs: Any) -> tf.Tensor:
    """Return the losses of samples."""
    is_sparse = choice.name == SPARSE_CROSS_ENTROPY
    if is_sparse or are_class_numbers(targets.shape, outputs.shape):
        losses = keras.losses.sparse_categorical_crossentropy
    else:
        losses = keras.losses.categorical_crossentropy
    return losses(targets, outputs, from_logits=choice.from_logits)


def _by_output(choice: LossChoice, targets: Any, outputs: Any) -> tf.Tensor:
    """Return the losses of single outputs."""
    check_targets(targets.shape, outputs.shape)
    expected, actual = (
        tf.expand_dims(tf.cast(tf.reshape(values, tf.shape(outputs)), outputs.dtype), -1)
        for values in (targets, outputs)
    )
    if choice.name == SQUARED_ERROR:
        return keras.losses.mean_squared_error(expected, actual)
    return keras.losses.binary_crossentropy(expected, actual, from_logits=choice.from_logits)


def optimizer_of(model: SimulatedModel, choice: OptimizerChoice) -> keras.optimizers.Optimizer:
    """Return an optimizer, built for the weights and scales that are trained.

    Raises:
        ConfigurationError: Keras refuses the options.
    """
    try:
        optimizer = _KINDS[choice.name](**choice.options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the optimizer {choice.name}: {error}") from error
    if choice.decays or choice.name == "AdamW":  # decays by default
        optimizer.exclude_from_weight_decay(var_list=model.scales())
    optimizer.build(model.trainable_variables)
    return optimizer
