"""Numerics trace of a pass through a Keras model, without side effects on the model.

Gradients with some layers in 16 bits serve the advice on training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.trainable import Gradients, TrainedLayer
from neural_mp.adaptors.tensorflow.capture.keras_models import Kwargs, wrap_layer_calls
from neural_mp.adaptors.tensorflow.training.policies import (
    FLOAT32,
    iterate_model_layers,
    list_unit_layers,
    name_in,
    put_policy,
    restore_layer_policies,
)
from neural_mp.core.precision import Precision
from neural_mp.core.training_numerics import LayerTrace, ModelTrace, ValueStats
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
    inputs, targets, weights = unpack_batch(batch)
    ensure_built(model, inputs)
    calls: list[_Call] = []

    def record_call(
        layer: keras.Layer, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        outputs = plain(*args, **kwargs)
        calls.append(_Call(layer, list_float_tensors((args, kwargs)), list_float_tensors(outputs)))
        return outputs

    with restore_variables(model), wrap_layer_calls(iterate_model_layers(model), record_call):
        with tf.GradientTape() as tape:
            outputs = model(inputs, training=True)
            value = None
            if targets is not None:
                value = compute_loss_value(model, loss, inputs, targets, outputs, weights)
                scaled = value * loss_scale
        grads = [] if value is None else _gradients_by_call(tape, scaled, calls)
    traces = [
        _make_layer_trace(model, call, *(grads[index] if grads else (None, None)))
        for index, call in enumerate(calls)
    ]
    number = None if value is None else float(value)
    return ModelTrace(
        ValueStats.from_values(inputs), ValueStats.from_values(outputs), traces, number
    )


def unpack_batch(batch: object) -> tuple[Any, Any, Any]:
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
    list(iterate_model_layers(model))  # refuses other objects
    try:
        with restore_variables(model):
            model(inputs, training=False)
    except (ValueError, TypeError, NotImplementedError, tf.errors.OpError) as error:
        raise DataError(
            f"model {model.name!r} does not accept the inputs of the batch: {one_line(error)}"
        ) from error


def compute_loss_value(
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
    function = resolve_loss_function(loss)
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


def resolve_loss_function(loss: object) -> Callable[..., Any]:
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
def restore_variables(model: keras.Model) -> Iterator[None]:
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


def list_float_tensors(values: object) -> list[tf.Tensor]:
    """Return the floating-point tensors in nested values, with ragged parts and variables."""
    leaves = [leaf for leaf in tree_leaves(values) if tf.is_tensor(leaf)]
    tensors = map(tf.convert_to_tensor, tf.nest.flatten(leaves, expand_composites=True))
    return [tensor for tensor in tensors if tensor.dtype.is_floating]


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
        (_compute_gradient_stats(outer), _compute_gradient_stats(inner))
        for outer, inner in zip(*gradients, strict=True)
    ]


def _compute_gradient_stats(gradients: Sequence[Any]) -> ValueStats:
    return ValueStats.from_values(
        [tf.convert_to_tensor(grad) for grad in gradients if grad is not None]
    )


def _make_layer_trace(
    model: keras.Model, call: _Call, above: ValueStats | None, below: ValueStats | None
) -> LayerTrace:
    layer = call.layer
    return LayerTrace(
        name=name_in(model, layer),
        kind=type(layer).__name__,
        dtype=layer.compute_dtype,
        inputs=ValueStats.from_values(call.inputs),
        outputs=ValueStats.from_values(call.outputs),
        weights=ValueStats.from_values([variable.value for variable in layer.variables]),
        gradients_above=above,
        gradients_below=below,
        holds_layers=bool(layer._flatten_layers(include_self=False)),
    )


#: Attributes of Keras layers for the rate of dropout or the strength of noise.
_RANDOM = ("rate", "stddev", "dropout", "recurrent_dropout")
#: Errors of TensorFlow when a model adds or multiplies tensors of two types.
_TYPE_ERRORS = (tf.errors.InvalidArgumentError, TypeError, ValueError, ConfigurationError)


@contextmanager
def open_trainable(
    model: keras.Model, batch: object, loss: object, precision: Precision, optimizer: object
) -> Iterator[TrainableKerasModel]:
    """Open a model in float32 for training advice; restore its state afterwards."""
    inputs, targets, _ = unpack_batch(batch)
    if targets is None:
        raise DataError("batches must be (inputs, targets), got a first batch without targets")
    ensure_built(model, inputs)
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise ConfigurationError(
            f"model {model.name!r} must be on one device, but is on several devices; create the "
            f"model outside of the strategy's scope with the same weights, and apply the plan to "
            f"both"
        )
    with restore_variables(model), restore_layer_policies(model):
        trainable = TrainableKerasModel(model, inputs, loss, precision, optimizer)
        yield trainable
    if trainable.refused:
        warnings.warn(
            f"the code of model {model.name!r} combines 16-bit and float32 tensors, which "
            f"TensorFlow refuses after the plan is applied ({trainable.refused}); use functions "
            f"of keras.ops, which cast, e.g. keras.ops.add",
            stacklevel=4,
        )


class TrainableKerasModel:
    """A Keras model as a `neural_mp.adaptors.common.trainable.TrainableModel`.

    Attributes:
        refused: TensorFlow's error about two types in the last pass; empty if there was none.
    """

    def __init__(
        self,
        model: keras.Model,
        inputs: object,
        loss: object,
        precision: Precision,
        optimizer: object,
    ) -> None:
        self._model, self._loss = model, loss
        self._policy = f"mixed_{'bfloat16' if precision is Precision.BF16 else 'float16'}"
        self._units = list_unit_layers(model)
        self._optimizer = _make_optimizer(model, optimizer)
        own = _list_float32_layers(self._units)
        put_policy([model], FLOAT32)
        outputs = _find_output_layers(model, self._units, inputs)
        self._layers = [
            TrainedLayer(
                name, type(layers[0]).__name__, _explain_float32_layer(name, layers, outputs, own)
            )
            for name, layers in self._units.items()
        ]
        self._step = tf.function(self._run_one_step, reduce_retracing=True)
        self.refused = ""

    @property
    def layers(self) -> Sequence[TrainedLayer]:
        """Return the layers in the model's order."""
        return self._layers

    def gradients(
        self, batch: object, low: Collection[str], scale: float, *, singly: bool = False
    ) -> Gradients:
        """Return the gradients of a batch with some layers in 16 bits, set by policies."""
        inputs, targets, weights = unpack_batch(batch)
        with (
            self._in_16_bits(low),
            restore_variables(self._model),
            _disable_randomness(self._model),
        ):
            self.refused = ""
            try:
                return self._compute_gradients(inputs, targets, weights, scale)
            except _TYPE_ERRORS as error:
                if not low:
                    raise
                self.refused = one_line(error)
            # The model's code combines two types, so 16-bit results are cast back.
            layers = [layer for name in low for layer in self._units[name]]
            with wrap_layer_calls(
                layers,
                lambda layer, plain, args, kwargs: tf.nest.map_structure(
                    _cast_to_float32, plain(*args, **kwargs)
                ),
            ):
                return self._compute_gradients(inputs, targets, weights, scale)

    def trace(self, batch: object, low: Collection[str], scale: float) -> ModelTrace:
        """Return the numerics trace of such a pass; layers always cast their inputs."""
        with self._in_16_bits(low), _disable_randomness(self._model):
            return trace_numerics(self._model, batch, self._loss, scale)

    def step(self, batch: object) -> float:
        """Run one training step in float32; return the loss before the step."""
        inputs, targets, weights = unpack_batch(batch)
        if not self._optimizer.built:
            # A first step that creates variables would be traced twice.
            self._optimizer.build(self._model.trainable_variables)
        return float(self._step(inputs, targets, weights))

    def _run_one_step(self, inputs: object, targets: object, weights: object) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = self._model(inputs, training=True)
            loss = compute_loss_value(self._model, self._loss, inputs, targets, outputs, weights)
        variables = self._model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def _compute_gradients(
        self, inputs: object, targets: object, weights: object, scale: float
    ) -> Gradients:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self._model(inputs, training=True)
            outputs = tf.nest.map_structure(_cast_to_float32, outputs)
            loss = compute_loss_value(self._model, self._loss, inputs, targets, outputs, weights)
            scaled = loss * scale
        grads = tape.gradient(scaled, [variable.value for variable in variables])
        arrays = [
            np.zeros(variable.shape, np.float32)
            if grad is None
            else tf.cast(tf.convert_to_tensor(grad), tf.float32).numpy() / np.float32(scale)
            for variable, grad in zip(variables, grads, strict=True)
        ]
        return Gradients(float(loss), arrays)

    @contextmanager
    def _in_16_bits(self, low: Collection[str]) -> Iterator[None]:
        layers = [layer for name in low for layer in self._units[name]]
        put_policy(layers, self._policy)
        try:
            yield
        finally:
            put_policy(layers, FLOAT32)


def _explain_float32_layer(
    name: str, layers: Collection[Any], outputs: Collection[str], own: Collection[str]
) -> str:
    if name in outputs:
        return "computes outputs of the model, which stay in float32"
    if any(inner._losses for layer in layers for inner in layer._flatten_layers()):
        return "adds to the loss, which stays in float32"
    return "has its own dtype, float32" if name in own else ""


def _make_optimizer(model: keras.Model, source: object) -> Any:
    """Return an optimizer of the given class, or of the class the model is compiled with."""
    if source is None:
        source = getattr(model, "optimizer", None) or "adam"
    try:
        instance = keras.optimizers.get(source)
    except ValueError:
        raise ConfigurationError(
            f"optimizer must be a Keras optimizer or the name of one, got {source!r}"
        ) from None
    if isinstance(instance, keras.optimizers.LossScaleOptimizer):
        instance = instance.inner_optimizer
    try:
        return _recreate_optimizer(instance)
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigurationError(
            f"optimizer {type(instance).__name__} cannot be recreated from its config "
            f"({one_line(error)}); pass an optimizer of Keras, e.g. optimizer='adam'"
        ) from error


def _recreate_optimizer(optimizer: keras.optimizers.Optimizer) -> Any:
    """Return a new optimizer of the class, sharing a schedule that Keras may not copy."""
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return type(optimizer).from_config(optimizer.get_config())
    without = object.__new__(type(optimizer))
    vars(without).update(vars(optimizer), _learning_rate=None)
    copy = type(optimizer).from_config(without.get_config())
    copy.learning_rate = rate
    return copy


def _list_float32_layers(units: Mapping[str, Sequence[Any]]) -> set[str]:
    """Return the layers in float32, set by the user, of a model with others in 16 bits."""
    dtypes = {name: layers[0].compute_dtype for name, layers in units.items()}
    if not {"float16", "bfloat16"}.intersection(dtypes.values()):
        return set()
    return {name for name, dtype in dtypes.items() if dtype == FLOAT32}


def _find_output_layers(
    model: keras.Model, units: Mapping[str, Sequence[Any]], inputs: object
) -> set[str]:
    """Return the layers that make the model's outputs; the last layer if ops follow."""
    producers: dict[int, str] = {}
    tensors: list[Any] = []  # the id of a deleted tensor may be reused
    called: list[str] = []
    names = {id(layer): name for name, layers in units.items() for layer in layers}

    def record_outputs(
        layer: keras.Layer, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: Kwargs
    ) -> Any:
        outputs = plain(*args, **kwargs)
        for tensor in list_float_tensors(outputs):
            tensors.append(tensor)
            producers[id(tensor)] = names[id(layer)]
        called.append(names[id(layer)])
        return outputs

    layers = [layer for group in units.values() for layer in group]
    with restore_variables(model), wrap_layer_calls(layers, record_outputs):
        outputs = model(inputs, training=True)
    return {
        producers.get(id(tensor), called[-1]) for tensor in list_float_tensors(outputs) if called
    }


@contextmanager
def _disable_randomness(model: keras.Model) -> Iterator[None]:
    """Disable dropout and noise, whose draws in 16 bits differ and look like an error."""
    with ExitStack() as undo:
        for layer in model._flatten_layers():
            if not type(layer).__module__.startswith("keras."):
                continue
            for name in _RANDOM:
                value = vars(layer).get(name)
                if isinstance(value, float) and value:
                    undo.callback(object.__setattr__, layer, name, value)
                    object.__setattr__(layer, name, 0.0)
        yield


def _cast_to_float32(value: Any) -> Any:
    is_float = tf.is_tensor(value) and value.dtype.is_floating
    return tf.cast(value, tf.float32) if is_float else value
