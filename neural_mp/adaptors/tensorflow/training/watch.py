"""`Watch`, a callback that stops training after useless steps and names the responsible layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import LossScaleOptimizer
from neural_mp.adaptors.tensorflow.training.numerics_trace import trace_numerics, unpacked
from neural_mp.core.numerics_trace import ModelTrace, NonFinite, first_non_finite
from neural_mp.errors import ConfigurationError, NeuralMPError, TrainingError
from neural_mp.util.validators import integer_between, validate_option

#: Logs of Keras for a batch or an epoch: metric → number.
Logs = Mapping[str, float]


class Watch(keras.callbacks.Callback):
    """Stops `fit` after too many consecutive useless steps, and names the responsible layer.

    Useless are steps that loss scaling skips due to non-finite gradients and, without loss scaling,
    steps after which the mean loss of the epoch is not finite. Keras never stops in either case.

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
        self._steps = 0
        self._iterator: Any = None
        self._weights: list[np.ndarray] = []
        self._plain: Callable[[Any], Any] | None = None

    def on_train_begin(self, logs: Logs | None = None) -> None:
        """Start counting, and record the source of batches."""
        self.finding, self._useless, self._seen = None, 0, 0
        self._steps = self._steps_made() if self._is_scaled else 0
        # After a `fit` that failed, the function of an earlier watch is still set.
        function = self.model.train_function
        self._plain = plain = getattr(function, "watched", function)

        def run(iterator: object) -> Any:
            self._iterator = iterator
            return plain(iterator)

        run.watched = plain  # type: ignore[attr-defined]
        self.model.train_function = run

    def on_epoch_begin(self, epoch: int, logs: Logs | None = None) -> None:
        """Restart the batch count, and save the weights if no loss scaling protects them."""
        self._seen = 0
        if self._useless == 0 and not self._is_scaled:
            self._weights = self.model.get_weights()

    def on_train_batch_end(self, batch: int, logs: Logs | None = None) -> None:
        """Count useless steps, and stop `fit` at the limit."""
        steps, self._seen = batch + 1 - self._seen, batch + 1
        self._useless = self._useless_in_a_row(steps, logs or {})
        if self._useless < self.patience:
            return
        found = self._batch()
        if found is not None:  # otherwise wait for the next epoch's batches
            self._stop(found)

    def on_train_end(self, logs: Logs | None = None) -> None:
        """Check the last steps of the training, and restore the model's functions."""
        if self._useless >= self.patience:
            self._stop(None)
        self._restore()
        self._weights = []

    def _useless_in_a_row(self, steps: int, logs: Logs) -> int:
        optimizer = self.model.optimizer
        if isinstance(optimizer, LossScaleOptimizer):
            return optimizer.skipped_in_a_row
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            before, self._steps = self._steps, self._steps_made()
            return 0 if self._steps > before else self._useless + steps
        return 0 if np.isfinite(logs.get("loss", 0.0)) else self._useless + steps

    def _steps_made(self) -> int:
        """Return the number of steps that changed weights, on the first device."""
        return int(tf.convert_to_tensor(self.model.optimizer.iterations.value))

    def _batch(self) -> Any:
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
    def _is_scaled(self) -> bool:
        return isinstance(self.model.optimizer, keras.optimizers.LossScaleOptimizer)

    def _stop(self, batch: object) -> None:
        words, scale = "the loss is not finite", 1.0
        if self._is_scaled:
            scale = float(tf.convert_to_tensor(self.model.optimizer.dynamic_scale.value))
            words = f"gradients were not finite, with a loss scale down to {scale:.3g}"
        self._restore()
        advice = self._advice(batch, scale) if batch is not None else ""
        raise TrainingError(f"{self._useless} steps in a row had no effect: {words}{advice}")

    def _advice(self, batch: object, scale: float) -> str:
        """Return the finding of a pass through a batch with the last good weights as text."""
        try:
            found = self._find_origin(batch, scale)
        except NeuralMPError as error:
            return f". The responsible layer cannot be found: {error}"
        if found is None:
            return ". A pass of the next batch is finite; check the data for NaN and Inf"
        words = f". {found.message[0].upper()}{found.message[1:]}"
        if not found.keep:
            return words
        return f"{words}. Keep the layer in float32: set_policy(…, keep=({found.layer!r},))"

    def _find_origin(self, batch: object, scale: float) -> NonFinite | None:
        if self._weights:
            current = self.model.get_weights()
            self.model.set_weights(self._weights)
        try:
            self.finding = first_non_finite(self._trace(batch, scale))
        finally:
            if self._weights:
                self.model.set_weights(current)
        return self.finding

    def _trace(self, batch: object, scale: float) -> ModelTrace:
        try:
            return trace_numerics(self.model, batch, loss_scale=scale)
        except ConfigurationError:  # only a custom train step has the loss
            return trace_numerics(self.model, unpacked(batch)[0])

    def _restore(self) -> None:
        if self._plain is not None:
            self.model.train_function, self._plain = self._plain, None
        self._iterator = None
