"""Loss scaling for the optimizers of `tf.compat.v1.train`, by the one rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf
from tensorflow.python.training.experimental.loss_scale import (
    DynamicLossScale,
    FixedLossScale,
)
from tensorflow.python.training.experimental.loss_scale import LossScale as AnyLossScale
from tensorflow.python.training.experimental.loss_scale_optimizer import (
    MixedPrecisionLossScaleOptimizer,
)

from neural_mp.adaptors.tensorflow.training.graph_rewrite_checks import check_step
from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
from neural_mp.core.loss_scale import LossScale
from neural_mp.errors import ConfigurationError
from neural_mp.util.text import with_article


class RuleLossScale(DynamicLossScale):
    """A `LossScale` as TensorFlow 1 takes one.

    It is a `DynamicLossScale`, also where the scale stays: only with these does TensorFlow skip
    steps whose gradients are not finite. Its variables are made in the graph that first asks.

    Args:
        rule: the rule.
    """

    def __init__(self, rule: LossScale) -> None:
        # The constructor in between makes variables of its own, and says that it is deprecated.
        AnyLossScale.__init__(self)
        self.rule = rule

    def __call__(self) -> Any:
        """The scale of the next step, float32."""
        return tf.convert_to_tensor(self.weight("current_loss_scale"))

    def update(self, grads: object) -> tuple[Any, Any]:
        """The op that changes the scale after a step, and whether its gradients are all finite."""
        finite = _all_finite(tf.nest.flatten(grads))
        names = ("current_loss_scale", "good_steps", "skipped_steps", "skipped_in_a_row")
        weights = [self.weight(name) for name in names]
        # All are read before any is written: the new values depend on more than one of them.
        scale, good, skipped, in_a_row = (tf.convert_to_tensor(weight) for weight in weights)
        one, none = tf.ones_like(good), tf.zeros_like(good)
        good, raised, lowered = good + one, scale, scale
        rule = self.rule
        if rule.growth_interval is not None:
            grows = good >= rule.growth_interval
            raised = tf.where(grows, tf.minimum(scale * rule.factor, rule.maximum), scale)
            good = tf.where(grows, none, good)
            lowered = tf.maximum(scale / rule.factor, rule.minimum)
        after = (
            tf.where(finite, raised, lowered),
            tf.where(finite, good, none),
            tf.where(finite, skipped, skipped + one),
            tf.where(finite, none, in_a_row + one),
        )
        with tf.control_dependencies(after):
            written = [weight.assign(value) for weight, value in zip(weights, after, strict=True)]
        return (None if tf.executing_eagerly() else tf.group(written)), finite

    def weight(self, name: str) -> Any:
        """A variable: the scale or a counter of steps, as `LossScaleState` has them."""
        with tf.init_scope():
            key = (
                name,
                None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()._graph_key,
            )
            if key in self._weights:
                return self._weights[key]
            is_scale = name == "current_loss_scale"
            start, dtype = (self.rule.initial, tf.float32) if is_scale else (0, tf.int64)
            return self._add_weight(name=name, initial_value=start, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        """What the constructor takes."""
        return {"rule": self.rule}

    def __repr__(self) -> str:
        return f"RuleLossScale({self.rule!r})"


class V1LossScaleOptimizer(MixedPrecisionLossScaleOptimizer):
    """An optimizer of TensorFlow 1 that scales the loss and skips steps that are not finite.

    It changes its scale by the rule that our optimizer for Keras goes by. In a graph, the
    properties are tensors, which a session runs; eager, they hold numbers.

    Args:
        opt: the optimizer that changes the weights.
        rule: how the loss is scaled.
    """

    def __init__(self, opt: tf.compat.v1.train.Optimizer, rule: LossScale) -> None:
        super().__init__(opt, RuleLossScale(rule))
        self.rule = rule

    @property
    def loss_scale(self) -> Any:
        """What the next loss is multiplied by."""
        return self._loss_scale()

    @property
    def skipped_steps(self) -> Any:
        """Steps whose gradients were not finite."""
        return tf.convert_to_tensor(self._loss_scale.weight("skipped_steps"))

    @property
    def skipped_in_a_row(self) -> Any:
        """How many of the last steps were skipped, one after the other."""
        return tf.convert_to_tensor(self._loss_scale.weight("skipped_in_a_row"))

    def compute_gradients(self, *args: object, **options: object) -> Any:
        """Gradients, divided by the scale again, with their variables.

        Raises:
            ConfigurationError: a mixed Keras policy has been set while the rewrite is enabled.
        """
        check_step()
        return super().compute_gradients(*args, **options)


def rule_of(loss_scale: Any) -> LossScale:
    """The rule that a user means: `"dynamic"`, a number, a `LossScale`, or one of TensorFlow 1.

    Raises:
        ConfigurationError: it is none of these, or a number is out of bounds.
    """
    if isinstance(loss_scale, RuleLossScale):
        return loss_scale.rule
    if type(loss_scale) is FixedLossScale:
        return LossScale.fixed(loss_scale.get_config()["loss_scale_value"])
    if type(loss_scale) is DynamicLossScale:
        initial, usual = loss_scale.initial_loss_scale, LossScale()
        return LossScale(
            initial,
            loss_scale.increment_period,
            loss_scale.multiplier,
            minimum=min(initial, usual.minimum),
            maximum=max(initial, usual.maximum),
        )
    if isinstance(loss_scale, AnyLossScale):
        raise ConfigurationError(
            f"loss_scale is {with_article(type(loss_scale).__name__)}, whose rule is not known; "
            f"give 'dynamic', a number, a LossScale, or a FixedLossScale or DynamicLossScale of "
            f"TensorFlow"
        )
    return LossScale.read(loss_scale)


def _all_finite(grads: Iterable[Any]) -> Any:
    """Whether all gradients are finite, on all devices that train together."""

    def finite(values: Iterable[Any]) -> Any:
        dense = (
            g.values if isinstance(g, tf.IndexedSlices) else g for g in values if g is not None
        )
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in dense])

    if not tf.distribute.has_strategy():
        return finite(grads)
    strategy = tf.distribute.get_strategy()
    bad = strategy.extended.call_for_each_replica(
        lambda values: tf.cast(tf.logical_not(finite(values)), tf.float32), args=(list(grads),)
    )
    return tf.equal(strategy.reduce(tf.distribute.ReduceOp.SUM, bad, axis=None), 0)


v1 = tf.compat.v1
_WRAPPED = (
    keras.optimizers.LossScaleOptimizer,
    v1.mixed_precision.MixedPrecisionLossScaleOptimizer,
)


def with_loss_scaling(opt: object, loss_scale: object) -> LossScaleOptimizer | V1LossScaleOptimizer:
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
