"""Loss scaling for the optimizers of `tf.compat.v1.train`, based on `LossScale`."""

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
from neural_mp.errors import ArgumentValueError
from neural_mp.util.text import with_article

v1 = tf.compat.v1
_SCALING_OPTIMIZERS = (keras.optimizers.LossScaleOptimizer, MixedPrecisionLossScaleOptimizer)


class RuleLossScale(DynamicLossScale):
    """A `LossScale` as a loss scale of TensorFlow 1.

    Derived from `DynamicLossScale` even for fixed scales: TensorFlow skips steps with non-finite
    gradients only for this class. The variables are created in the graph that first uses them.
    """

    def __init__(self, rule: LossScale) -> None:
        # The skipped constructor creates its own variables and warns that it is deprecated.
        AnyLossScale.__init__(self)
        self.rule = rule

    def __call__(self) -> Any:
        """Return the scale of the next step, float32."""
        return tf.convert_to_tensor(self.weight("current_loss_scale"))

    def update(self, grads: object) -> tuple[Any, Any]:
        """Return the op that updates the scale after a step, and whether gradients are finite."""
        finite = _all_finite(tf.nest.flatten(grads))
        names = ("current_loss_scale", "good_steps", "skipped_steps", "skipped_in_a_row")
        weights = [self.weight(name) for name in names]
        # Read all before the first write: new values depend on several old ones.
        scale, good, skipped, in_a_row = (tf.convert_to_tensor(weight) for weight in weights)
        one, none = tf.ones_like(good), tf.zeros_like(good)
        good, raised, lowered = good + one, scale, scale
        rule = self.rule
        if rule.growth_interval is not None:
            grows = good >= rule.growth_interval
            raised = tf.where(grows, tf.minimum(scale * rule.factor, rule.maximum), scale)
            good = tf.where(grows, none, good)
            lowered = tf.maximum(scale / rule.factor, rule.minimum)
        updates = (
            tf.where(finite, raised, lowered),
            tf.where(finite, good, none),
            tf.where(finite, skipped, skipped + one),
            tf.where(finite, none, in_a_row + one),
        )
        with tf.control_dependencies(updates):
            written = [weight.assign(value) for weight, value in zip(weights, updates, strict=True)]
        return (None if tf.executing_eagerly() else tf.group(written)), finite

    def weight(self, name: str) -> Any:
        """Return a variable: the scale or a step counter, named as in `LossScaleState`."""
        with tf.init_scope():
            eager = tf.executing_eagerly()
            key = name, None if eager else tf.compat.v1.get_default_graph()._graph_key
            if key in self._weights:
                return self._weights[key]
            is_scale = name == "current_loss_scale"
            start, dtype = (self.rule.initial, tf.float32) if is_scale else (0, tf.int64)
            return self._add_weight(name=name, initial_value=start, dtype=dtype)

    def get_config(self) -> dict[str, Any]:
        """Return the arguments of the constructor."""
        return {"rule": self.rule}

    def __repr__(self) -> str:
        return f"RuleLossScale({self.rule!r})"


class V1LossScaleOptimizer(MixedPrecisionLossScaleOptimizer):
    """A TensorFlow 1 optimizer that scales the loss and skips non-finite steps.

    The scale follows the same rule as `LossScaleOptimizer`. The properties are tensors in a graph,
    to be run by a session, and numbers in eager mode.
    """

    def __init__(self, opt: tf.compat.v1.train.Optimizer, rule: LossScale) -> None:
        super().__init__(opt, RuleLossScale(rule))
        self.rule = rule

    @property
    def loss_scale(self) -> Any:
        """Scale of the next loss."""
        return self._loss_scale()

    @property
    def skipped_steps(self) -> Any:
        """Number of steps whose gradients were not finite."""
        return tf.convert_to_tensor(self._loss_scale.weight("skipped_steps"))

    @property
    def skipped_in_a_row(self) -> Any:
        """Number of consecutive skipped steps up to now."""
        return tf.convert_to_tensor(self._loss_scale.weight("skipped_in_a_row"))

    def compute_gradients(self, *args: object, **options: object) -> Any:
        """Return the unscaled gradients with their variables.

        Raises:
            ConfigurationError: a mixed Keras policy was set after the rewrite was enabled.
        """
        check_step()
        return super().compute_gradients(*args, **options)


def rule_of(loss_scale: Any) -> LossScale:
    """Return the rule for `"dynamic"`, a number, a `LossScale`, or a TensorFlow 1 loss scale.

    Raises:
        ConfigurationError: the loss scale is of another type, or a number is out of bounds.
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
        raise ArgumentValueError(
            f"loss_scale must be 'dynamic', a number, a LossScale, or a FixedLossScale or "
            f"DynamicLossScale of TensorFlow, got {with_article(type(loss_scale).__name__)}"
        )
    return LossScale.read(loss_scale)


def _all_finite(grads: Iterable[Any]) -> Any:
    """Whether all gradients are finite on all devices that train together."""

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


def with_loss_scaling(opt: object, loss_scale: object) -> LossScaleOptimizer | V1LossScaleOptimizer:
    """Return the optimizer, wrapped in one that scales the loss.

    Raises:
        ConfigurationError: `opt` scales the loss already or is not an optimizer; `loss_scale` is
            invalid.
    """
    if isinstance(opt, _SCALING_OPTIMIZERS):
        raise ArgumentValueError(
            f"opt must not scale the loss, got {with_article(type(opt).__name__)}; pass its inner "
            f"optimizer, which enable_mixed_precision_graph_rewrite wraps"
        )
    kinds = (keras.optimizers.Optimizer, v1.train.Optimizer)
    if not isinstance(opt, kinds):
        hint = ""
        if isinstance(opt, type) and issubclass(opt, kinds):
            hint = f"; call the class: {opt.__name__}(…)"
        elif isinstance(opt, str):
            hint = f"; use keras.optimizers.get({opt!r})"
        raise ArgumentValueError(
            f"opt must be an optimizer of Keras 3 or of tf.compat.v1.train, got {opt!r}{hint}"
        )
    rule = rule_of(loss_scale)
    if isinstance(opt, v1.train.Optimizer):
        return V1LossScaleOptimizer(opt, rule)
    return LossScaleOptimizer(opt, rule)
