"""Gradients of a Keras model with some layers in 16 bits, for training advice."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.trainable import Gradients, TrainedLayer
from neural_mp.adaptors.tensorflow.capture.keras_models import calls_wrapped
from neural_mp.adaptors.tensorflow.training.numerics_trace import (
    ensure_built,
    floating,
    loss_value,
    trace_numerics,
    unpacked,
    untouched,
)
from neural_mp.adaptors.tensorflow.training.policies import (
    FLOAT32,
    put_policy,
    restored_policies,
    unit_layers,
)
from neural_mp.core.numerics_trace import ModelTrace
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, DataError, one_line

#: Attributes of Keras layers for the rate of dropout or the strength of noise.
_RANDOM = ("rate", "stddev", "dropout", "recurrent_dropout")
#: Errors of TensorFlow when a model adds or multiplies tensors of two types.
_TYPE_ERRORS = (tf.errors.InvalidArgumentError, TypeError, ValueError, ConfigurationError)


@contextmanager
def open_trainable(
    model: keras.Model, batch: object, loss: object, precision: Precision, optimizer: object
) -> Iterator[TrainableKerasModel]:
    """Open a model in float32 for training advice; restore its state afterwards."""
    inputs, targets, _ = unpacked(batch)
    if targets is None:
        raise DataError("batches must be (inputs, targets), got a first batch without targets")
    ensure_built(model, inputs)
    if model.distribute_strategy.num_replicas_in_sync > 1:
        raise ConfigurationError(
            f"model {model.name!r} must be on one device, but is on several devices; create the "
            f"model outside of the strategy's scope with the same weights, and apply the plan to "
            f"both"
        )
    with untouched(model), restored_policies(model):
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
        self._units = unit_layers(model)
        self._optimizer = _make_optimizer(model, optimizer)
        own = _float32_layers(self._units)
        put_policy([model], FLOAT32)
        outputs = _output_layers(model, self._units, inputs)
        self._layers = [
            TrainedLayer(
                name, type(layers[0]).__name__, _float32_reason(name, layers, outputs, own)
            )
            for name, layers in self._units.items()
        ]
        self._step = tf.function(self._one_step, reduce_retracing=True)
        self.refused = ""

    @property
    def layers(self) -> Sequence[TrainedLayer]:
        """Return the layers in the model's order."""
        return self._layers

    def gradients(
        self, batch: object, low: Collection[str], scale: float, *, singly: bool = False
    ) -> Gradients:
        """Return the gradients of a batch with some layers in 16 bits, set by policies."""
        inputs, targets, weights = unpacked(batch)
        with self._in_16_bits(low), untouched(self._model), _disable_randomness(self._model):
            self.refused = ""
            try:
                return self._compute_gradients(inputs, targets, weights, scale)
            except _TYPE_ERRORS as error:
                if not low:
                    raise
                self.refused = one_line(error)
            # The model's code combines two types, so 16-bit results are cast back.
            layers = [layer for name in low for layer in self._units[name]]
            with calls_wrapped(layers, _cast_back):
                return self._compute_gradients(inputs, targets, weights, scale)

    def trace(self, batch: object, low: Collection[str], scale: float) -> ModelTrace:
        """Return the numerics trace of such a pass; layers always cast their inputs."""
        with self._in_16_bits(low), _disable_randomness(self._model):
            return trace_numerics(self._model, batch, self._loss, scale)

    def step(self, batch: object) -> float:
        """Run one training step in float32; return the loss before the step."""
        inputs, targets, weights = unpacked(batch)
        if not self._optimizer.built:
            # A first step that creates variables would be traced twice.
            self._optimizer.build(self._model.trainable_variables)
        return float(self._step(inputs, targets, weights))

    def _one_step(self, inputs: object, targets: object, weights: object) -> tf.Tensor:
        with tf.GradientTape() as tape:
            outputs = self._model(inputs, training=True)
            loss = loss_value(self._model, self._loss, inputs, targets, outputs, weights)
        variables = self._model.trainable_variables
        self._optimizer.apply(tape.gradient(loss, variables), variables)
        return loss

    def _compute_gradients(
        self, inputs: object, targets: object, weights: object, scale: float
    ) -> Gradients:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            outputs = self._model(inputs, training=True)
            outputs = tf.nest.map_structure(_as_float32, outputs)
            loss = loss_value(self._model, self._loss, inputs, targets, outputs, weights)
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


def _float32_reason(
    name: str, layers: Collection[Any], outputs: Collection[str], own: Collection[str]
) -> str:
    if name in outputs:
        return "computes outputs of the model, which stay in float32"
    if any(inner._losses for layer in layers for inner in layer._flatten_layers()):
        return "adds to the loss, which stays in float32"
    return "has its own dtype, float32" if name in own else ""


def _make_optimizer(model: keras.Model, given: object) -> Any:
    """Return an optimizer of the given class, or of the class the model is compiled with."""
    if given is None:
        given = getattr(model, "optimizer", None) or "adam"
    try:
        instance = keras.optimizers.get(given)
    except ValueError:
        raise ConfigurationError(
            f"optimizer must be a Keras optimizer or the name of one, got {given!r}"
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


def _float32_layers(units: Mapping[str, Sequence[Any]]) -> set[str]:
    """Return the layers in float32, set by the user, of a model with others in 16 bits."""
    dtypes = {name: layers[0].compute_dtype for name, layers in units.items()}
    if not {"float16", "bfloat16"}.intersection(dtypes.values()):
        return set()
    return {name for name, dtype in dtypes.items() if dtype == FLOAT32}


def _output_layers(
    model: keras.Model, units: Mapping[str, Sequence[Any]], inputs: object
) -> set[str]:
    """Return the layers that make the model's outputs; the last layer if ops follow."""
    producers: dict[int, str] = {}
    tensors: list[Any] = []  # the id of a deleted tensor may be reused
    called: list[str] = []
    names = {id(layer): name for name, layers in units.items() for layer in layers}

    def record_outputs(
        layer: keras.Layer, plain: Callable[..., Any], args: Any, kwargs: Any
    ) -> Any:
        outputs = plain(*args, **kwargs)
        for tensor in floating(outputs):
            tensors.append(tensor)
            producers[id(tensor)] = names[id(layer)]
        called.append(names[id(layer)])
        return outputs

    layers = [layer for group in units.values() for layer in group]
    with untouched(model), calls_wrapped(layers, record_outputs):
        outputs = model(inputs, training=True)
    return {producers.get(id(tensor), called[-1]) for tensor in floating(outputs) if called}


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


def _cast_back(layer: keras.Layer, plain: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    return tf.nest.map_structure(_as_float32, plain(*args, **kwargs))


def _as_float32(value: Any) -> Any:
    is_float = tf.is_tensor(value) and value.dtype.is_floating
    return tf.cast(value, tf.float32) if is_float else value
