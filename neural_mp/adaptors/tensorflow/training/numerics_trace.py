"""Numerics trace of a pass through a Keras model, without side effects on the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from neural_mp.adaptors.tensorflow.capture.keras_models import Around, calls_wrapped
from neural_mp.adaptors.tensorflow.training.policies import layers_of, name_in
from neural_mp.core.numerics_trace import LayerTrace, ModelTrace, ValueStats
from neural_mp.errors import ConfigurationError, DataError, did_you_mean, one_line
from neural_mp.util.pytree import tree_leaves


@dataclass
class _Call:
    """One call of a layer: the floating-point inputs and outputs."""

    layer: Any
    inputs: list[tf.Tensor]
    outputs: list[tf.Tensor] = field(default_factory=list)


def trace_numerics(
    model: keras.Model, batch: object, loss: object = None, loss_scale: float = 1.0
) -> ModelTrace:
    """Run a batch through a model as in training, and trace each layer.

    The loss is by default the one that the model was compiled with. Without targets, neither loss
    nor gradients are computed.
    """
    inputs, targets, weights = unpacked(batch)
    ensure_built(model, inputs)
    calls: list[_Call] = []
    with untouched(model), calls_wrapped(layers_of(model), _call_recorder(calls)):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            value = None
            if targets is not None:
                value = loss_value(model, loss, inputs, targets, outputs, weights)
                scaled = value * loss_scale
        grads = [] if value is None else _gradients_by_call(tape, scaled, calls)
    traces = [
        _layer_trace(model, call, *(grads[index] if grads else (None, None)))
        for index, call in enumerate(calls)
    ]
    number = None if value is None else float(value)
    return ModelTrace(ValueStats.of(inputs), ValueStats.of(outputs), traces, number)


def unpacked(batch: object) -> tuple[Any, Any, Any]:
    """Return the inputs, targets and sample weights of a batch; None for missing parts.

    Raises:
        DataError: the batch is a tuple or list of another length.
    """
    if isinstance(batch, tuple | list) and not 1 <= len(batch) <= 3:
        raise DataError(
            f"a batch must be inputs, (inputs, targets) or (inputs, targets, sample_weights), got "
            f"{len(batch)} items"
        )
    return keras.utils.unpack_x_y_sample_weight(batch)


def ensure_built(model: keras.Model, inputs: object) -> None:
    """Build a model; models of custom classes create their layers on the first call.

    Raises:
        DataError: the inputs do not fit the model.
    """
    list(layers_of(model))  # refuses other objects
    try:
        with untouched(model):
            model(inputs, training=False)
    except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        raise DataError(
            f"model {model.name!r} does not accept the inputs of the batch: {one_line(error)}"
        ) from error


def loss_value(
    model: keras.Model,
    loss: object,
    inputs: object,
    targets: object,
    outputs: object,
    weights: object = None,
) -> tf.Tensor:
    """Return the loss of a batch, with losses added by layers, as a float32 scalar.

    Raises:
        ConfigurationError: there is no loss, no loss of that name, the result is not a scalar, or
            the loss function fails.
    """
    if loss is None:
        if not getattr(model, "compiled", False):
            raise ConfigurationError(
                f"loss must be given, because model {model.name!r} is not compiled; pass e.g. "
                f"loss='sparse_categorical_crossentropy'"
            )
        try:
            # Not the public method: an override by the user may lack `training`.
            value = model._compute_loss(inputs, targets, outputs, weights, training=True)
        except (ValueError, TypeError, KeyError, tf.errors.OpError) as error:
            raise ConfigurationError(
                f"the compiled loss of model {model.name!r} fails for the batch "
                f"({one_line(error)}); correct the targets, or pass a loss, e.g. loss='mse'"
            ) from error
        return tf.cast(value, tf.float32)
    function = loss_function(loss)
    weighted = isinstance(function, keras.losses.Loss) and weights is not None
    options = {"sample_weight": weights} if weighted else {}
    try:
        value = tf.convert_to_tensor(function(targets, outputs, **options))
    except (ValueError, TypeError, tf.errors.OpError) as error:
        raise ConfigurationError(f"the loss {loss!r} fails: {one_line(error)}") from error
    if value.shape.rank != 0:
        raise ConfigurationError(
            f"the loss must return one number, got an array of shape {tuple(value.shape)}; take "
            f"its mean"
        )
    return tf.add_n([tf.cast(part, tf.float32) for part in (value, *model.losses)])


def loss_function(loss: object) -> Callable[..., Any]:
    """Return the loss function that a user names or passes; raise `ConfigurationError` for none."""
    if isinstance(loss, str):
        names = [name for name in dir(keras.losses) if name[:1] != "_" and name not in _NO_LOSSES]
        try:
            loss = keras.losses.get(loss)
        except ValueError:
            raise ConfigurationError(
                f"Keras has no loss {loss!r}{did_you_mean(loss, names)}"
            ) from None
        loss = loss() if isinstance(loss, type) else _NamedLoss(loss)
    if not callable(loss):
        raise ConfigurationError(
            f"loss must be a Keras loss, the name of one, or a function of targets and outputs, "
            f"got {loss!r}"
        )
    return loss


class _NamedLoss(keras.losses.Loss):
    """A Keras function as a loss, with the mean and sample weights that `compile` adds."""

    def __init__(self, function: Any) -> None:
        super().__init__(name=function.__name__)
        self._function = function

    def call(self, y_true: tf.Tensor, y_pred: tf.Tensor) -> Any:
        """Return the loss of every sample."""
        return self._function(y_true, y_pred)


_NO_LOSSES = ("deserialize", "serialize", "get", "Loss")


@contextmanager
def untouched(model: keras.Model) -> Iterator[None]:
    """Restore all variables of a model afterwards: weights, statistics, seeds, metrics."""
    metrics = list(model.metrics)
    variables = [*model.variables, *model.metrics_variables]
    values = [(variable, tf.identity(variable.value)) for variable in variables]
    try:
        yield
    finally:
        for variable, value in values:
            variable.assign(value)
        for metric in model.metrics:  # a loss creates its metrics on first use
            if not any(metric is original for original in metrics):
                metric.reset_state()


def floating(values: object) -> list[tf.Tensor]:
    """Return the floating-point tensors in nested values, with ragged parts and variables."""
    leaves = [leaf for leaf in tree_leaves(values) if tf.is_tensor(leaf)]
    tensors = map(tf.convert_to_tensor, tf.nest.flatten(leaves, expand_composites=True))
    return [tensor for tensor in tensors if tensor.dtype.is_floating]


def _call_recorder(calls: list[_Call]) -> Around:
    def record_call(layer: keras.Layer, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        outputs = plain(*args, **kwargs)
        calls.append(_Call(layer, floating((args, kwargs)), floating(outputs)))
        return outputs

    return record_call


def _gradients_by_call(
    tape: tf.GradientTape, loss: tf.Tensor, calls: Sequence[_Call]
) -> list[tuple[ValueStats, ValueStats]]:
    """Return, per call, the gradients of its outputs, and those of its inputs and weights."""
    above = [call.outputs for call in calls]
    below = [
        [*call.inputs, *(weight.value for weight in call.layer.trainable_variables)]
        for call in calls
    ]
    gradients = tape.gradient(loss, [above, below])
    return [
        (_gradient_stats(outer), _gradient_stats(inner))
        for outer, inner in zip(*gradients, strict=True)
    ]


def _gradient_stats(gradients: Sequence[Any]) -> ValueStats:
    dense = [tf.convert_to_tensor(grad) for grad in gradients if grad is not None]
    return ValueStats.of(dense)


def _layer_trace(
    model: keras.Model, call: _Call, above: ValueStats | None, below: ValueStats | None
) -> LayerTrace:
    layer = call.layer
    return LayerTrace(
        name=name_in(model, layer),
        kind=type(layer).__name__,
        dtype=layer.compute_dtype,
        inputs=ValueStats.of(call.inputs),
        outputs=ValueStats.of(call.outputs),
        weights=ValueStats.of([variable.value for variable in layer.variables]),
        gradients_above=above,
        gradients_below=below,
        holds_layers=bool(layer._flatten_layers(include_self=False)),
    )
