"""Quantize and dequantize in one step, with gradients for values and scales, as Keras layers.

Straight-through estimator for values; learned step sizes (Esser et al., "Learned Step Size
Quantization", 2020) for scales, as logarithms of their ratio to the initial scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.quant_params import QuantParams, weight_scales
from neural_mp.adaptors.common.ranges import STEPS
from neural_mp.adaptors.common.simulation import gradient_factor, moving_range
from neural_mp.adaptors.tensorflow.fusion import LARGEST_AVERAGE
from neural_mp.adaptors.tensorflow.tensor_graph import Array

_F32 = "float32"


#: Multiple of all numbers of values in an average of the integer kernel.
_PARTS = math.lcm(*range(1, LARGEST_AVERAGE + 1))


def _half_up(steps: tf.Tensor) -> tf.Tensor:
    return tf.floor(steps + 0.5)


def _half_to_even(steps: tf.Tensor) -> tf.Tensor:
    """Round averages of integers, of which many are halves, as the integer kernel does."""
    return tf.round(tf.round(steps * _PARTS) / _PARTS)


def _activation_rounding(rounding: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return the function that quantizes a tensor to uint8 and dequantizes it."""

    @tf.custom_gradient
    def rounded_by(
        x: tf.Tensor, log_scale: tf.Tensor, initial: tf.Tensor, zero_point: tf.Tensor
    ) -> Any:
        scale = initial * tf.exp(log_scale)
        steps = x / scale + zero_point
        rounded = (rounding(tf.clip_by_value(steps, 0.0, STEPS)) - zero_point) * scale

        def gradients(grad: tf.Tensor) -> Any:
            within = tf.where((steps >= -0.5) & (steps <= STEPS + 0.5), grad, 0.0)
            # d(rounded)/d(log scale) is rounded − x within the range, and rounded outside.
            scale_grad = tf.reduce_sum(grad * rounded) - tf.reduce_sum(within * x)
            factor = tf.math.rsqrt(tf.cast(tf.maximum(tf.size(x), 1), tf.float32) * STEPS)
            return within, scale_grad * factor, None, None

        return rounded, gradients

    return rounded_by


_rounded = _activation_rounding(_half_up)
_rounded_average = _activation_rounding(_half_to_even)


class FakeQuantizer(keras.layers.Layer):
    """The quantization of a tensor to uint8, or of tensors with a common scale."""

    def __init__(self, encoding: QuantParams, learned: bool, name: str | None = None) -> None:
        super().__init__(dtype=_F32, name=name)
        self.log_scale = self.add_weight(
            shape=(), dtype=_F32, initializer="zeros", trainable=learned, name="log_scale"
        )
        self.initial = variable_of(self, encoding.scale, "initial", False)
        self.zero_point = variable_of(self, encoding.zero_point, "zero_point", False)
        self.built = True

    @property
    def encoding(self) -> QuantParams:
        """The current scale and zero point."""
        scale = float(np.float64(self.initial) * np.exp(np.float64(self.log_scale)))
        return QuantParams(scale, int(self.zero_point.numpy()))

    def call(
        self, x: tf.Tensor, observing: tf.Tensor | None = None, averaged: bool = False
    ) -> tf.Tensor:
        """Return the tensor after quantize and dequantize.

        The range follows if `observing`. `averaged` tensors are averages of quantized ones.
        """
        x = tf.cast(x, tf.float32)
        if observing is not None:
            self._observe(x, observing)
        variables = self.log_scale, self.initial, self.zero_point
        function = _rounded_average if averaged else _rounded
        return function(x, *(variable.value for variable in variables))

    def _observe(self, x: tf.Tensor, observing: tf.Tensor) -> None:
        params = self.initial.value * tf.exp(self.log_scale.value), self.zero_point.value
        ends = tf.reduce_min(x), tf.reduce_max(x)
        scale, zero_point = tf.numpy_function(_followed, [*params, *ends], (tf.float32, tf.float32))
        follow(observing, self.initial, scale)
        follow(observing, self.zero_point, zero_point)
        follow(observing, self.log_scale, 0.0)


def _followed(scale: Array, zero_point: Array, low: Array, high: Array) -> tuple[Any, Any]:
    """Return scale and zero point after a batch with a range."""
    previous = QuantParams(float(scale), int(zero_point))
    updated = QuantParams.of(moving_range((previous.low, previous.high), (float(low), float(high))))
    return np.float32(updated.scale), np.float32(updated.zero_point)


class FakeWeight(keras.layers.Layer):
    """A weight, quantized to int8 with a scale per output channel.

    Attributes:
        weight: the float weight.
        limit: the largest integer.
        axes: the axes of the weight that share a scale.
    """

    def __init__(
        self,
        value: Array,
        axes: tuple[int, ...],
        limit: int,
        learned: bool,
        trained: bool,
        name: str | None = None,
    ) -> None:
        super().__init__(dtype=_F32, name=name)
        self.limit, self.axes = limit, axes
        scales = weight_scales(value, axes, limit)
        self.weight = variable_of(self, value, "weight", trained)
        self.log_scales = self.add_weight(
            shape=scales.shape,
            dtype=_F32,
            initializer="zeros",
            trainable=learned,
            name="log_scales",
        )
        self.initial = variable_of(self, scales, "initial", False)
        self.built = True

    def scales(self) -> Array:
        """Return the current scales, with the axes of the weight."""
        return np.asarray(self.initial.value * tf.exp(self.log_scales.value))

    def call(self, observing: tf.Tensor | None = None) -> tf.Tensor:
        """Return the weight after quantize and dequantize; its scales follow if `observing`."""
        weight = self.weight.value
        if observing is not None:
            self._observe(weight, observing)
        return self._round(weight, self.log_scales.value, self.initial.value)

    def _observe(self, weight: tf.Tensor, observing: tf.Tensor) -> None:
        scales = tf.numpy_function(
            lambda value: weight_scales(value, tuple(self.axes), self.limit), [weight], tf.float32
        )
        follow(observing, self.initial, scales)
        follow(observing, self.log_scales, 0.0)

    @property
    def _round(self) -> Any:
        limit, axes = float(self.limit), tuple(self.axes)

        @tf.custom_gradient
        def rounding(weight: tf.Tensor, logs: tf.Tensor, initial: tf.Tensor) -> Any:
            scales = initial * tf.exp(logs)
            steps = weight / scales
            rounded = tf.clip_by_value(tf.round(steps), -limit, limit) * scales

            def gradients(grad: tf.Tensor) -> Any:
                within = tf.where(tf.abs(steps) <= limit + 0.5, grad, 0.0)
                scale_grad = tf.reduce_sum(grad * rounded - within * weight, axes, keepdims=True)
                values = weight.shape.num_elements() // logs.shape.num_elements()
                return within, scale_grad * gradient_factor(values, self.limit), None

            return rounded, gradients

        return rounding


def follow(observing: tf.Tensor, variable: keras.Variable, value: Any) -> None:
    """Set a variable if `observing`."""
    updated = tf.where(observing, value, variable.value)
    variable.assign(tf.ensure_shape(updated, variable.shape))


def variable_of(
    layer: keras.layers.Layer, value: Any, name: str, trained: bool, dtype: str = _F32
) -> keras.Variable:
    """Add a variable with a value to a layer."""
    variable = layer.add_weight(
        shape=np.shape(value), dtype=dtype, initializer="zeros", trainable=trained, name=name
    )
    variable.assign(value)
    return variable
