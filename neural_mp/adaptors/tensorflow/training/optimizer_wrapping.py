"""The optimizer with loss scaling that goes with the graph rewrite, for Keras and TensorFlow 1."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
from neural_mp.adaptors.tensorflow.training.v1_loss_scale import V1LossScaleOptimizer, rule_of
from neural_mp.core.grammar import with_article
from neural_mp.errors import ConfigurationError

v1 = tf.compat.v1
_WRAPPED = (
    keras.optimizers.LossScaleOptimizer,
    v1.mixed_precision.MixedPrecisionLossScaleOptimizer,
)


def with_loss_scaling(opt: Any, loss_scale: Any) -> LossScaleOptimizer | V1LossScaleOptimizer:
    """The optimizer, wrapped in one that scales the loss.

    Args:
        opt: a Keras optimizer, or one of `tf.compat.v1.train`.
        loss_scale: `"dynamic"`, a number, which stays, a `LossScale`, or a `FixedLossScale` or
            `DynamicLossScale` of `tf.compat.v1.mixed_precision`.

    Raises:
        ConfigurationError: `opt` scales the loss already or is no optimizer; `loss_scale` is none.
    """
    if isinstance(opt, _WRAPPED):
        raise ConfigurationError(
            f"opt is {with_article(type(opt).__name__)}, which scales the loss already; give "
            f"the optimizer in it, enable_mixed_precision_graph_rewrite wraps it itself"
        )
    kinds = (keras.optimizers.Optimizer, v1.train.Optimizer)
    if not isinstance(opt, kinds):
        hint = ""
        if isinstance(opt, type) and issubclass(opt, kinds):
            hint = f"; call the class: {opt.__name__}(…)"
        elif isinstance(opt, str):
            hint = f"; make one of the word: keras.optimizers.get({opt!r})"
        raise ConfigurationError(
            f"opt must be a Keras 3 optimizer or one of tf.compat.v1.train, got {opt!r}{hint}"
        )
    rule = rule_of(loss_scale)
    if isinstance(opt, v1.train.Optimizer):
        return V1LossScaleOptimizer(opt, rule)
    return LossScaleOptimizer(opt, rule)
