"""Loss scaling for Keras, in `fit` and in loops of one's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import keras
import tensorflow as tf
from keras import ops

from neural_mp.adaptors.tensorflow.training.graph_rewrite_checks import check_step
from neural_mp.core.loss_scale import DYNAMIC, LossScale
from neural_mp.errors import ConfigurationError

#: For a scale that stays: the base class counts up to this.
_NEVER = 2**30


@keras.saving.register_keras_serializable("neural_mp")
class LossScaleOptimizer(keras.optimizers.LossScaleOptimizer):
    """An optimizer that scales the loss, so that small gradients do not vanish in float16.

    Steps whose gradients hold NaN or Inf change no weight, and do not count. It goes by one rule
    with torch's `GradScaler` of this package (`LossScale`), and speaks both languages:

    - that of Keras 3: `scale_loss(loss)`, then `apply` or `apply_gradients` with the gradients as
      they are; `fit` does so by itself;
    - that of the guides for Keras 2: `get_scaled_loss(loss)`, `get_unscaled_gradients(gradients)`,
      then `apply_gradients`.

    It is saved in `.keras` files and checkpoints with all that it has counted.

    Args:
        optimizer: the Keras optimizer that changes the weights.
        loss_scale: `"dynamic"`, a number, which stays, or a `LossScale`.
        name: its name.

    Raises:
        ConfigurationError: what is wrapped is no Keras optimizer, or scales the loss already; the
            loss scale is none; Keras does not run on TensorFlow.
    """

    def __init__(
        self,
        optimizer: keras.optimizers.Optimizer,
        loss_scale: str | float | LossScale = DYNAMIC,
        name: str | None = None,
    ) -> None:
        if keras.config.backend() != "tensorflow":
            raise ConfigurationError(
                f"Keras runs on the {keras.config.backend()} backend here; loss scaling needs "
                f"KERAS_BACKEND=tensorflow"
            )
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise ConfigurationError(
                f"{type(optimizer).__name__} scales the loss already; give the optimizer in it"
            )
        if not isinstance(optimizer, keras.optimizers.Optimizer):
            raise ConfigurationError(
                f"optimizer must be a Keras optimizer, such as keras.optimizers.SGD(), got "
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
        # Whoever scaled the loss says so when a step is traced, and with it what `apply` is given.
        self._gradients_are_unscaled = False
        self._awaits_unscaling = False

    def build(self, var_list: Sequence[Any]) -> None:
        """Make the variables.

        Raises:
            ConfigurationError: a mixed Keras policy was set after the graph rewrite was enabled.
        """
        check_step()
        if self.built:
            return
        super().build(var_list)
        self._skipped_steps = self._counter("skipped_steps")
        self._skipped_in_a_row = self._counter("skipped_in_a_row")

    def _counter(self, name: str) -> Any:
        return self.add_variable((), "zeros", "int", aggregation="none", name=name)

    @property
    def loss_scale(self) -> float:
        """What the next loss is multiplied by."""
        return float(_number(self.dynamic_scale)) if self.built else self.rule.initial

    @property
    def skipped_steps(self) -> int:
        """Steps whose gradients were not finite."""
        return int(_number(self._skipped_steps)) if self.built else 0

    @property
    def skipped_in_a_row(self) -> int:
        """How many of the last steps were skipped, one after the other."""
        return int(_number(self._skipped_in_a_row)) if self.built else 0

    def scale_loss(self, loss: tf.Tensor) -> Any:
        """The loss times the scale, as Keras 3 asks for it; gradients go to `apply` as they are."""
        self._gradients_are_unscaled = self._awaits_unscaling = False
        return super().scale_loss(loss)

    def get_scaled_loss(self, loss: tf.Tensor | Callable[[], tf.Tensor]) -> Any:
        """The loss times the scale, as in Keras 2.

        Of a function without arguments that gives a loss, one that gives the scaled loss.
        """
        if callable(loss):
            return lambda: self.get_scaled_loss(loss())
        self._awaits_unscaling = True
        return super().scale_loss(loss)

    def get_unscaled_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Gradients of a loss of `get_scaled_loss`, divided by the scale; `apply` takes them so."""
        self._gradients_are_unscaled, self._awaits_unscaling = True, False
        scale = self.dynamic_scale if self.built else self.initial_scale
        return [None if grad is None else ops.divide(grad, scale) for grad in grads]

    def apply(self, grads: Sequence[Any], trainable_variables: Sequence[Any] | None = None) -> None:
        """Change the weights if all gradients are finite, and the scale by the rule.

        Raises:
            ConfigurationError: the loss comes from `get_scaled_loss`, and the gradients did not go
                through `get_unscaled_gradients`; a mixed Keras policy was set after the graph
                rewrite was enabled.
        """
        check_step()
        if self._awaits_unscaling:
            raise ConfigurationError(
                "gradients of a loss from get_scaled_loss are scaled; put them through "
                "get_unscaled_gradients before apply_gradients"
            )
        super().apply(grads, trainable_variables)

    def stateless_apply(
        self, optimizer_variables: object, grads: object, trainable_variables: object
    ) -> Any:
        """Refused: it is for other backends than TensorFlow."""
        raise ConfigurationError("stateless_apply has no place where Keras runs on TensorFlow")

    def check_finite(self, grads: Sequence[Any]) -> Any:
        """Whether all gradients are finite, on all devices that train together.

        The base class asks the first device alone: NaN on another one gets into the weights.
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

        def grow() -> None:
            self.step_counter.assign(0)
            grown = ops.multiply(self.dynamic_scale, self.rule.factor)
            self.dynamic_scale.assign(ops.minimum(grown, self.rule.maximum))

        def count() -> None:
            self.step_counter.assign_add(1)

        last = ops.greater_equal(self.step_counter, self.dynamic_growth_steps - 1)
        ops.cond(last, grow, count)

    def _stateful_handle_non_finite_grads(self) -> None:
        self._skipped_steps.assign_add(1)
        self._skipped_in_a_row.assign_add(1)
        self.step_counter.assign(0)
        if not self.rule.is_fixed:
            lowered = ops.divide(self.dynamic_scale, self.rule.factor)
            self.dynamic_scale.assign(ops.maximum(lowered, self.rule.minimum))

    def get_config(self) -> dict[str, Any]:
        """What `from_config` takes."""
        inner = keras.saving.serialize_keras_object(self.inner_optimizer)
        return {"name": self.name, "inner_optimizer": inner, "loss_scale": asdict(self.rule)}

    @classmethod
    def from_config(
        cls, config: dict[str, Any], custom_objects: dict[str, Any] | None = None
    ) -> LossScaleOptimizer:
        """The optimizer that gave this config."""
        inner = keras.saving.deserialize_keras_object(
            config["inner_optimizer"], custom_objects=custom_objects
        )
        return cls(inner, LossScale(**config["loss_scale"]), config["name"])


def _number(variable: keras.Variable) -> Any:
    """The value of a variable; of one that several devices hold, that of the first."""
    return tf.convert_to_tensor(variable.value).numpy()
