"""`Watch`, a callback that stops training after useless steps and names the responsible layer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
from neural_mp.adaptors.tensorflow.training.numerics_trace import trace_numerics, unpack_batch
from neural_mp.adaptors.tensorflow.training.policies import iterate_model_layers
from neural_mp.core.training_numerics import ModelTrace, NonFinite, first_non_finite
from neural_mp.errors import ConfigurationError, NeuralMPError, TrainingError
from neural_mp.util.pytree import tree_leaves
from neural_mp.util.validators import integer_between, validate_option

logger = logging.getLogger(__name__)

#: Logs of Keras for a batch or an epoch: metric → number.
Logs = Mapping[str, float]


#: Attribute with the optimizer of `compile`.
_COMPILED = "optimizer"
_LOSS_SCALING = keras.optimizers.LossScaleOptimizer


class _Scaler:
    """Count of the consecutive steps that a loss-scale optimizer skipped.

    Args:
        name: attribute of the model with the optimizer.
        optimizer: the optimizer.
    """

    def __init__(self, name: str, optimizer: keras.optimizers.LossScaleOptimizer) -> None:
        self.name, self.useless = name, 0
        self._optimizer = optimizer
        self._before = self._steps_and_scale()

    def count_steps(self, steps: int) -> None:
        """Count the last steps of the training, in which the optimizer may not have been used."""
        if isinstance(self._optimizer, LossScaleOptimizer):
            self.useless = self._optimizer.skipped_in_a_row
            return
        previous, self._before = self._before, self._steps_and_scale()
        if self._before[0] > previous[0]:
            self.useless = 0
        elif self._before[1] < previous[1] or not self._before[1]:
            self.useless += steps

    @property
    def loss_scale(self) -> float:
        """The scale of the next loss."""
        if not self._optimizer.built:
            return float(self._optimizer.initial_scale)
        return float(tf.convert_to_tensor(self._optimizer.dynamic_scale.value))

    def _steps_and_scale(self) -> tuple[int, float]:
        return _count_optimizer_steps(self._optimizer), self.loss_scale


def _find_model_optimizers(model: keras.Model) -> dict[keras.optimizers.Optimizer, str]:
    """Return optimizer → its attribute in a model or a model in it.

    Optimizers inside of loss-scale optimizers are left out.
    """
    models = [part for part in iterate_model_layers(model) if isinstance(part, keras.Model)]
    names: dict[keras.optimizers.Optimizer, str] = {}
    for holder in dict.fromkeys((model, *models)):
        prefix = "" if holder is model else f"{holder.name}."
        # Keras and TensorFlow list all attributes in private ones.
        for name in sorted(vars(holder), key=lambda name: name.startswith("_")):
            for leaf in tree_leaves(vars(holder)[name]):
                if isinstance(leaf, keras.optimizers.Optimizer):
                    names.setdefault(leaf, f"{prefix}{name}")
    inner = [leaf.inner_optimizer for leaf in names if isinstance(leaf, _LOSS_SCALING)]
    return {optimizer: name for optimizer, name in names.items() if optimizer not in inner}


def _count_optimizer_steps(optimizer: keras.optimizers.Optimizer) -> int:
    """Return the number of steps that changed weights, on the first device."""
    return int(tf.convert_to_tensor(optimizer.iterations.value))


class Watch(keras.callbacks.Callback):
    """Stops `fit` after too many consecutive useless steps, and names the responsible layer.

    Useless are steps that a loss-scale optimizer skips due to non-finite gradients and, unless all
    optimizers in use scale the loss, steps after which a logged value is not finite, such as the
    mean loss of the epoch. Optimizers are found among the attributes of the model and of the models
    in it. Keras never stops in either case.

    Args:
        patience: maximum number of consecutive useless steps.
        sample: batch, `(inputs, targets)`, for finding the layer; by default the next batch of the
            training.

    Attributes:
        finding: the result; None before `fit` is stopped.

    Raises:
        ConfigurationError: patience is not an integer of at least 1.
        TrainingError: from `fit`, on stopping.
    """

    def __init__(self, patience: int = 20, sample: object = None) -> None:
        super().__init__()
        self.patience = validate_option("patience", integer_between(1), patience)
        self.sample = sample
        self.finding: NonFinite | None = None
        self._useless = 0
        self._seen = 0
        self._scalers: list[_Scaler] = []
        self._others: list[tuple[keras.optimizers.Optimizer, int]] = []
        self._non_finite: dict[str, int] = {}
        self._iterator: Any = None
        self._weights: list[np.ndarray] = []
        self._has_warned = False
        self._plain: Callable[[Any], Any] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start counting, and record the source of batches."""
        self.finding, self._useless, self._seen, self._non_finite = None, 0, 0, {}
        optimizers = _find_model_optimizers(self.model)
        self._scalers = [
            _Scaler(n, o) for o, n in optimizers.items() if isinstance(o, _LOSS_SCALING)
        ]
        self._others = [
            (o, _count_optimizer_steps(o)) for o in optimizers if not isinstance(o, _LOSS_SCALING)
        ]
        # After a `fit` that failed, the function of an earlier watch is still set.
        function = self.model.train_function
        self._plain = plain = getattr(function, "watched", function)

        def record_iterator(iterator: object) -> Any:
            self._iterator = iterator
            return plain(iterator)

        record_iterator.watched = plain  # type: ignore[attr-defined]
        self.model.train_function = record_iterator

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Restart the batch count, and save the weights if no loss scaling protects them."""
        self._seen = 0
        if self._useless == 0 and (self._others or not self._scalers):
            self._weights = self.model.get_weights()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count useless steps, and stop `fit` at the limit."""
        steps, self._seen = batch + 1 - self._seen, batch + 1
        self._useless = self._useless_in_a_row(steps, logs or {})
        if self._useless < self.patience:
            return
        current = self._sample_batch()
        if current is not None:  # otherwise wait for the next epoch's batches
            self._raise_training_error(current)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Check the last steps of the training, and restore the model's functions."""
        if self._useless >= self.patience:
            self._raise_training_error(None)
        self._restore_train_function()
        self._weights = []

    def _useless_in_a_row(self, steps: int, logs: Logs) -> int:
        """Return the largest number of consecutive useless steps of an optimizer or value."""
        numbers = {name: np.asarray(value) for name, value in logs.items()}
        numbers = {name: number for name, number in numbers.items() if number.dtype.kind in "fc"}
        self._non_finite = {
            name: 0 if np.isfinite(number).all() else self._non_finite.get(name, 0) + steps
            for name, number in numbers.items()
            if not self._is_protected
        }
        for scaler in self._scalers:
            scaler.count_steps(steps)
        if not self._scalers and not numbers and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "Watch has nothing to watch: train_step must return the loss, e.g. "
                "{'loss': loss}, or the model must have a LossScaleOptimizer as an attribute, got "
                "neither"
            )
        return max((*self._non_finite.values(), *(s.useless for s in self._scalers)), default=0)

    def _sample_batch(self) -> Any:
        """Return a batch for finding the layer; None at the end of the epoch."""
        if self.sample is not None:
            return self.sample
        try:
            batch = next(self._iterator)
        except (StopIteration, tf.errors.OutOfRangeError):
            return None
        first = self.model.distribute_strategy.experimental_local_results
        return tf.nest.map_structure(lambda value: first(value)[0], batch)

    @property
    def _is_protected(self) -> bool:
        """Whether the weights only changed by finite gradients of scaled losses."""
        idle = (_count_optimizer_steps(optimizer) == steps for optimizer, steps in self._others)
        return bool(self._scalers) and all(idle)

    def _raise_training_error(self, batch: object) -> None:
        cause, scale = self._describe_cause()
        self._restore_train_function()
        advice = self._describe_origin(batch, scale) if batch is not None else ""
        raise TrainingError(f"{self._useless} steps in a row had no effect: {cause}{advice}")

    def _describe_cause(self) -> tuple[str, float]:
        """Return the reason for stopping as text, and the scale of the loss."""
        for scaler in self._scalers:
            if scaler.useless == self._useless:
                gradients = "gradients"
                if scaler.name != _COMPILED:
                    gradients = f"gradients of the optimizer {scaler.name!r}"
                scale = scaler.loss_scale
                return f"{gradients} were not finite, with a loss scale down to {scale:.3g}", scale
        names = [name for name, steps in self._non_finite.items() if steps == self._useless]
        if "loss" in names:
            return "the loss is not finite", 1.0
        return f"the logged value {names[0]!r} is not finite", 1.0

    def _describe_origin(self, batch: object, scale: float) -> str:
        """Return the finding of a pass through a batch with the last good weights as text."""
        try:
            origin = self._find_origin(batch, scale)
        except NeuralMPError as error:
            return f". The responsible layer cannot be found: {error}"
        if origin is None:
            return ". A pass of the next batch is finite; check the data for NaN and Inf"
        message = f". {origin.message[0].upper()}{origin.message[1:]}"
        if not origin.keep:
            return message
        return f"{message}. Keep the layer in float32: set_policy(…, keep=({origin.layer!r},))"

    def _find_origin(self, batch: object, scale: float) -> NonFinite | None:
        current = [] if self._is_protected else self.model.get_weights()
        if current and self._weights:
            self.model.set_weights(self._weights)
        try:
            self.finding = first_non_finite(self._trace_batch(batch, scale))
        finally:
            if current:
                self.model.set_weights(current)
        return self.finding

    def _trace_batch(self, batch: object, scale: float) -> ModelTrace:
        try:
            return trace_numerics(self.model, batch, loss_scale=scale)
        except ConfigurationError:  # only a custom train step has the loss
            return trace_numerics(self.model, unpack_batch(batch)[0])

    def _restore_train_function(self) -> None:
        if self._plain is not None:
            self.model.train_function, self._plain = self._plain, None
        self._iterator = None
