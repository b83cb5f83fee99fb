"""Losses and optimizers of Keras by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from neural_mp.adaptors.common.training_choices import (
    SPARSE_CROSS_ENTROPY,
    LossChoice,
    OptimizerChoice,
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

    Targets with fewer dimensions than the outputs are class numbers, others distributions.
    """

    def cross_entropy(targets: Any, outputs: Any) -> tf.Tensor:
        sparse = choice.name == SPARSE_CROSS_ENTROPY or len(targets.shape) < len(outputs.shape)
        losses = (
            keras.losses.sparse_categorical_crossentropy
            if sparse
            else keras.losses.categorical_crossentropy
        )
        found = losses(targets, outputs, from_logits=choice.from_logits)
        return tf.reduce_sum(found) if choice.sums else tf.reduce_mean(found)

    return cross_entropy


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
