"""Loss scaling for Keras, in `fit` and in custom training loops, and for TensorFlow 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import Any

import keras
import tensorflow as tf
from keras import ops
from tensorflow.python.training.experimental.loss_scale import DynamicLossScale, FixedLossScale
from tensorflow.python.training.experimental.loss_scale import LossScale as AnyLossScale
from tensorflow.python.training.experimental.loss_scale_optimizer import (
    MixedPrecisionLossScaleOptimizer,
)

from neural_mp.adaptors.tensorflow.training.graph_rewrite_checks import check_step
from neural_mp.core.training_numerics import DYNAMIC, LossScale
from neural_mp.errors import ArgumentTypeError, ArgumentValueError, ConfigurationError
from neural_mp.util.text import with_article

#: Growth interval of a fixed scale, which the base class never reaches.
_NEVER = 2**30


@keras.saving.register_keras_serializable("neural_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, so that small gradients do not vanish in float16.

    Steps whose gradients contain NaN or Inf change no weight, and are not counted. The scale
    follows the rule of this package's `GradScaler` for torch (`LossScale`), with two APIs:

    - Keras 3: `scale_loss(loss)`, then `apply` or `apply_gradients` with the scaled gradients, as
      `fit` does automatically;
    - the guides for Keras 2: `get_scaled_loss(loss)`, `get_unscaled_gradients(gradients)`, then
      `apply_gradients`.

    `.keras` files and checkpoints include all of its state.

    Args:
        optimizer: Keras optimizer that changes the weights.
        loss_scale: `"dynamic"`, a fixed number, or a `LossScale`.
        name: name of the optimizer.

    Raises:
        ConfigurationError: the wrapped object is not a Keras optimizer, or scales the loss
            already; the loss scale is invalid; Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss_scale: str | float | LossScale = DYNAMIC,
        name: str | None = None,
    ) -> None:
        if keras.config.backend() != "tensorflow":
            raise ConfigurationError(
                f"the Keras backend must be tensorflow for loss scaling, got "
                f"{keras.config.backend()}; set KERAS_BACKEND=tensorflow"
            )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ArgumentTypeError(
                f"optimizer must not scale the loss, got {with_article(type(optimizer).__name__)}; "
                f"pass its inner_optimizer"
            )
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ArgumentTypeError(
                f"optimizer must be a Keras optimizer, e.g. keras.optimizers.SGD(), got "
                f"{optimizer!r}"
            )
        rule = LossScale.read(loss_scale)
        super().__init__(
            optimizer,
            initial_scale=rule.initial,
            dynamic_growth_steps=rule.growth_interval or _NEVER,
            name=name,
        )
        self.rule = rule
        # Set by the method that scales the loss as a step is traced; `apply` reads the flags.
        self._gradients_are_unscaled = False
        self._awaits_unscaling = False

    def build(self, var_list: Sequence[Any]) -> None:
        """Create the variables.

        Raises:
            ConfigurationError: a mixed Keras policy was set after the graph rewrite was enabled.
        """
        check_step()
        if self.built:
            return
        super().build(var_list)
        self._skipped_steps = self._add_counter("skipped_steps")
        self._skipped_in_a_row = self._add_counter("skipped_in_a_row")

    def _add_counter(self, name: str) -> Any:
        return self.add_variable((), "zeros", "int", aggregation="none", name=name)

    @property
    def loss_scale(self) -> float:
        """Scale of the next loss."""
        return float(_read_variable_value(self.dynamic_scale)) if self.built else self.rule.initial

    @property
    def skipped_steps(self) -> int:
        """Number of steps whose gradients were not finite."""
        return int(_read_variable_value(self._skipped_steps)) if self.built else 0

    @property
    def skipped_in_a_row(self) -> int:
        """Number of consecutive skipped steps up to now."""
        return int(_read_variable_value(self._skipped_in_a_row)) if self.built else 0

    def scale_loss(self, loss: tf.Tensor) -> Any:
        """Return the scaled loss, as in Keras 3; pass the gradients to `apply` unchanged."""
        self._gradients_are_unscaled = self._awaits_unscaling = False
        return super().scale_loss(loss)

    def get_scaled_loss(self, loss: tf.Tensor | Callable[[], tf.Tensor]) -> Any:
        """Return the scaled loss, as in Keras 2.

        For a function without arguments that returns a loss, return a function of the scaled loss.
        """
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        self._awaits_unscaling = True
        return super().scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Divide the gradients of a loss of `get_scaled_loss` by the scale, for `apply`."""
        self._gradients_are_unscaled, self._awaits_unscaling = True, False
        scale = self.dynamic_scale if self.built else self.initial_scale
        return [None if grad is None else ops.divide(grad, scale) for grad in grads]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Change the weights if all gradients are finite, and the scale by the rule.

        Raises:
            ConfigurationError: the loss comes from `get_scaled_loss`, but the gradients not from
                `get_unscaled_gradients`; a mixed Keras policy was set after the graph rewrite was
                enabled.
        """
        check_step()
        if self._awaits_unscaling:
            raise ConfigurationError(
                "gradients of a loss from get_scaled_loss must be unscaled: call "
                "get_unscaled_gradients before apply_gradients"
            )
        super().apply(grads, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: object, grads: object, trainable_variables: object
    ) -> Any:
        """Raise an error: only other Keras backends use the method."""
        raise ConfigurationError(
            "stateless_apply is not supported with the Keras backend tensorflow; call apply"
        )

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether all gradients are finite on all devices that train together.

        The base class checks the first device only: NaN on another would reach the weights.
        """
        finite = super().check_finite(grads)
        replicas = tf.distribute.get_replica_context()
        if replicas is None or replicas.num_replicas_in_sync == 1:
            return finite
        bad = tf.cast(tf.logical_not(finite), tf.float32)
        return tf.equal(replicas.all_reduce(tf.distribute.ReduceOp.SUM, bad), 0)

    def _stateful_handle_finite_grads(
        self, grads: Sequence[tf.Tensor | None], trainable_variables: Sequence[keras.Variable]
    ) -> None:
        variables = trainable_variables or self._trainable_variables
        if not self._gradients_are_unscaled:
            grads = [
                grad
                if grad is None or getattr(variable, "overwrite_with_gradient", False)
                else ops.divide(grad, self.dynamic_scale)
                for grad, variable in zip(grads, variables, strict=True)
            ]
        self.inner_optimizer.apply(grads, trainable_variables=trainable_variables)
        self._skipped_in_a_row.assign(0)
        if self.rule.is_fixed:
            return

        def grow_scale() -> None:
            self.step_counter.assign(0)
            grown = ops.multiply(self.dynamic_scale, self.rule.factor)
            self.dynamic_scale.assign(ops.minimum(grown, self.rule.maximum))

        def count_step() -> None:
            self.step_counter.assign_add(1)

        last = ops.greater_equal(self.step_counter, self.dynamic_growth_steps - 1)
        ops.cond(last, grow_scale, count_step)

    def _stateful_handle_non_finite_grads(self) -> None:
        self._skipped_steps.assign_add(1)
        self._skipped_in_a_row.assign_add(1)
        self.step_counter.assign(0)
        if not self.rule.is_fixed:
            lowered = ops.divide(self.dynamic_scale, self.rule.factor)
            self.dynamic_scale.assign(ops.maximum(lowered, self.rule.minimum))

    def get_config(self) -> dict[str, Any]:
        """Return the configuration for `from_config`."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "loss_scale": asdict(self.rule)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """Create the optimizer from its configuration."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(inner, LossScale(**config["loss_scale"]), config["name"])


def _read_variable_value(variable: keras.Variable) -> Any:
    """Return the value of a variable, on the first device if there are several."""
    return tf.convert_to_tensor(variable.value).numpy()


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
        return tf.convert_to_tensor(self.get_variable("current_loss_scale"))

    def update(self, grads: object) -> tuple[Any, Any]:
        """Return the op that updates the scale after a step, and whether gradients are finite."""
        finite = _are_all_finite(tf.nest.flatten(grads))
        names = ("current_loss_scale", "good_steps", "skipped_steps", "skipped_in_a_row")
        weights = [self.get_variable(name) for name in names]
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

    def get_variable(self, name: str) -> Any:
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
        return tf.convert_to_tensor(self._loss_scale.get_variable("skipped_steps"))

    @property
    def skipped_in_a_row(self) -> Any:
        """Number of consecutive skipped steps up to now."""
        return tf.convert_to_tensor(self._loss_scale.get_variable("skipped_in_a_row"))

    def compute_gradients(self, *args: object, **options: object) -> Any:
        """Return the unscaled gradients with their variables.

        Raises:
            ConfigurationError: a mixed Keras policy was set after the rewrite was enabled.
        """
        check_step()
        return super().compute_gradients(*args, **options)


def parse_scale_rule(loss_scale: Any) -> LossScale:
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


def _are_all_finite(grads: Iterable[Any]) -> Any:
    """Whether all gradients are finite on all devices that train together."""

    def are_finite(values: Iterable[Any]) -> Any:
        dense = (
            g.values if isinstance(g, tf.IndexedSlices) else g for g in values if g is not None
        )
        return tf.reduce_all([tf.reduce_all(tf.math.is_finite(g)) for g in dense])

    if not tf.distribute.has_strategy():
        return are_finite(grads)
    strategy = tf.distribute.get_strategy()
    bad = strategy.extended.call_for_each_replica(
        lambda values: tf.cast(tf.logical_not(are_finite(values)), tf.float32), args=(list(grads),)
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
    kinds = (keras.optimizers.Optimizer, tf.compat.v1.train.Optimizer)
    if not isinstance(opt, kinds):
        hint = ""
        if isinstance(opt, type) and issubclass(opt, kinds):
            hint = f"; call the class: {opt.__name__}(…)"
        elif isinstance(opt, str):
            hint = f"; use keras.optimizers.get({opt!r})"
        raise ArgumentValueError(
            f"opt must be an optimizer of Keras 3 or of tf.compat.v1.train, got {opt!r}{hint}"
        )
    rule = parse_scale_rule(loss_scale)
    if isinstance(opt, tf.compat.v1.train.Optimizer):
        return V1LossScaleOptimizer(opt, rule)
    return LossScaleOptimizer(opt, rule)
