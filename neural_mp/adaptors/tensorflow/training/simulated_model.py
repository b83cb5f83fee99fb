"""The Keras model of a simulation, for `fit` or the user's own training loop, and its layers.

Made from the graph that conversion reads: with batch norms folded, it runs in float and rounds
where the converted graph does. Trained numbers are converted by the same `convert.write`.

The layers quantize and dequantize in one step, with a straight-through estimator as gradient of
values, and learned step sizes (Esser et al., "Learned Step Size Quantization", 2020) for scales, as
logarithms of their ratio to the initial scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.quant_params import STEPS, QuantParams, weight_scales
from neural_mp.adaptors.common.simulation import (
    TrainedModel,
    TrainingSchedule,
    lsq_gradient_factor,
    update_moving_range,
)
from neural_mp.adaptors.tensorflow.capture.keras_models import list_nested_layers
from neural_mp.adaptors.tensorflow.graph.fusion import LARGEST_AVERAGE
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, PLACEHOLDERS, get_op_properties
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    Array,
    NodeDef,
    TensorGraph,
    get_node_name,
    make_constant,
    read_constant_dtype,
)
from neural_mp.adaptors.tensorflow.kernels.convert import convert_frozen_graph
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import list_summed_axes
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.training.simulated_walk import (
    Rounding,
    Walk,
    can_be_called,
    has_gradient,
    list_node_owners,
    make_plan_rounding,
)
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.errors import ConfigurationError, ConversionError
from neural_mp.space import ResolvedPlan

_F32 = "float32"


#: Multiple of all numbers of values in an average of the integer kernel.
_PARTS = math.lcm(*range(1, LARGEST_AVERAGE + 1))


def _make_activation_rounding(rounding: Callable[[tf.Tensor], tf.Tensor]) -> Any:
    """Return the function that quantizes a tensor to uint8 and dequantizes it."""

    @tf.custom_gradient
    def rounded_by(
        x: tf.Tensor, log_scale: tf.Tensor, initial: tf.Tensor, zero_point: tf.Tensor
    ) -> Any:
        scale = initial * tf.exp(log_scale)
        steps = x / scale + zero_point
        rounded = (rounding(tf.clip_by_value(steps, 0.0, STEPS)) - zero_point) * scale

        def rounding_gradients(grad: tf.Tensor) -> Any:
            within = tf.where((steps >= -0.5) & (steps <= STEPS + 0.5), grad, 0.0)
            # d(rounded)/d(log scale) is rounded − x within the range, and rounded outside.
            scale_grad = tf.reduce_sum(grad * rounded) - tf.reduce_sum(within * x)
            factor = tf.math.rsqrt(tf.cast(tf.maximum(tf.size(x), 1), tf.float32) * STEPS)
            return within, scale_grad * factor, None, None

        return rounded, rounding_gradients

    return rounded_by


_rounded = _make_activation_rounding(lambda steps: tf.floor(steps + 0.5))  # halves up
# The integer kernel rounds averages of integers, of which many are halves, to even.
_rounded_average = _make_activation_rounding(
    lambda steps: tf.round(tf.round(steps * _PARTS) / _PARTS)
)


class FakeQuantizer(keras.layers.Layer):
    """The quantization of a tensor to uint8, or of tensors with a common scale."""

    def __init__(self, encoding: QuantParams, learned: bool, name: str | None = None) -> None:
        super().__init__(dtype=_F32, name=name)
        self.log_scale = self.add_weight(
            shape=(), dtype=_F32, initializer="zeros", trainable=learned, name="log_scale"
        )
        self.initial = add_layer_variable(self, encoding.scale, "initial", False)
        self.zero_point = add_layer_variable(self, encoding.zero_point, "zero_point", False)
        self.built = True

    @property
    def quant_params(self) -> QuantParams:
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
            self._update_scales(x, observing)
        variables = self.log_scale, self.initial, self.zero_point
        function = _rounded_average if averaged else _rounded
        return function(x, *(variable.value for variable in variables))

    def _update_scales(self, x: tf.Tensor, observing: tf.Tensor) -> None:
        params = self.initial.value * tf.exp(self.log_scale.value), self.zero_point.value
        ends = tf.reduce_min(x), tf.reduce_max(x)
        scale, zero_point = tf.numpy_function(
            _follow_range, [*params, *ends], (tf.float32, tf.float32)
        )
        assign_if_observing(observing, self.initial, scale)
        assign_if_observing(observing, self.zero_point, zero_point)
        assign_if_observing(observing, self.log_scale, 0.0)


def _follow_range(scale: Array, zero_point: Array, low: Array, high: Array) -> tuple[Any, Any]:
    previous = QuantParams(float(scale), int(zero_point))
    updated = QuantParams.of(
        update_moving_range((previous.low, previous.high), (float(low), float(high)))
    )
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
        self.weight = add_layer_variable(self, value, "weight", trained)
        self.log_scales = self.add_weight(
            shape=scales.shape,
            dtype=_F32,
            initializer="zeros",
            trainable=learned,
            name="log_scales",
        )
        self.initial = add_layer_variable(self, scales, "initial", False)
        self.built = True

    def call(self, observing: tf.Tensor | None = None) -> tf.Tensor:
        """Return the weight after quantize and dequantize; its scales follow if `observing`."""
        weight = self.weight.value
        if observing is not None:
            self._update_scales(weight, observing)
        return self._round_function(weight, self.log_scales.value, self.initial.value)

    def _update_scales(self, weight: tf.Tensor, observing: tf.Tensor) -> None:
        scales = tf.numpy_function(
            lambda value: weight_scales(value, tuple(self.axes), self.limit), [weight], tf.float32
        )
        assign_if_observing(observing, self.initial, scales)
        assign_if_observing(observing, self.log_scales, 0.0)

    @property
    def _round_function(self) -> Any:
        limit, axes = float(self.limit), tuple(self.axes)

        @tf.custom_gradient
        def round_weight(weight: tf.Tensor, logs: tf.Tensor, initial: tf.Tensor) -> Any:
            scales = initial * tf.exp(logs)
            steps = weight / scales
            rounded = tf.clip_by_value(tf.round(steps), -limit, limit) * scales

            def rounding_gradients(grad: tf.Tensor) -> Any:
                within = tf.where(tf.abs(steps) <= limit + 0.5, grad, 0.0)
                scale_grad = tf.reduce_sum(grad * rounded - within * weight, axes, keepdims=True)
                values = weight.shape.num_elements() // logs.shape.num_elements()
                return within, scale_grad * lsq_gradient_factor(values, self.limit), None

            return rounded, rounding_gradients

        return round_weight


def assign_if_observing(
    observing: tf.Tensor, variable: keras.Variable, value: tf.Tensor | float
) -> None:
    """Set a variable if `observing`."""
    updated = tf.where(observing, value, variable.value)
    variable.assign(tf.ensure_shape(updated, variable.shape))


def add_layer_variable(
    layer: keras.layers.Layer, value: Array | float, name: str, trained: bool, dtype: str = _F32
) -> keras.Variable:
    """Add a variable with a value to a layer."""
    variable = layer.add_weight(
        shape=np.shape(value), dtype=dtype, initializer="zeros", trainable=trained, name=name
    )
    variable.assign(value)
    return variable


Seen = Callable[[NodeDef, Sequence[tf.Tensor]], None]


@dataclass(frozen=True)
class Source:
    """Origin of a simulation.

    Attributes:
        given: the FP32 model, with the corrections of the plan.
        plan: the plan.
        ranges: scale owner → range before training.
        rounding: rounding of the model under the plan.
        reference: the FP32 model without corrections.
    """

    given: TensorFlowModel
    plan: ResolvedPlan
    ranges: Mapping[str, Range]
    rounding: Rounding
    reference: TensorFlowModel

    def __deepcopy__(self, memo: dict[int, Any]) -> Source:
        return self

    def find_weight_constant(self, node: str) -> str:
        """Return the constant of a node's INT8 weight."""
        return get_node_name(self.given.graph.nodes[node].input[self.rounding.weights[node]])


@dataclass(frozen=True)
class FloatWeight:
    """A weight that is not quantized.

    Attributes:
        value: the value before training.
        trained: whether it is trained.
    """

    value: Array
    trained: bool


@keras.saving.register_keras_serializable("neural_mp")
class SimulatedModel(keras.Model):
    """A model that computes with the rounding of a plan, and can be trained.

    Called like the original. Files of `save_weights` and `save` hold weights, scales and the number
    of steps; `load_weights` resumes from either in a simulation made with the same plan. The graph
    was captured in inference mode: there is no dropout.

    Attributes:
        schedule: schedule of scales.
        source: origin of the simulation, which `finish` reads.
        record: values of the caller that travel with the model.
        steps: number of calls in training mode.
        kernels: constant → INT8 weight.
        floats: constant → variable of another weight.
        quantizers: scale owner → quantizer of activations.
    """

    def __init__(
        self,
        source: Source,
        schedule: TrainingSchedule,
        kernels: Mapping[str, FakeWeight],
        floats: Mapping[str, FloatWeight],
        quantizers: Mapping[str, FakeQuantizer],
    ) -> None:
        super().__init__(name="simulation", dtype="float32")
        self.supports_jit = False  # Observers call Python, which XLA cannot.
        self.schedule, self.source, self.record = schedule, source, None
        self.steps = add_layer_variable(self, 0, "steps", False, dtype="int64")
        variables = [
            add_layer_variable(self, weight.value, name.replace("/", "_"), weight.trained)
            for name, weight in floats.items()
        ]
        # Keras saves layers in lists by their positions, and replaces a dict that is set.
        self.all_kernels, self.all_quantizers = list(kernels.values()), list(quantizers.values())
        self._found = _Parts(kernels, dict(zip(floats, variables, strict=True)), quantizers)
        self.built = True

    @property
    def kernels(self) -> Mapping[str, FakeWeight]:
        """Constant → INT8 weight."""
        return self._found.kernels

    @property
    def floats(self) -> Mapping[str, keras.Variable]:
        """Constant → variable of a weight that is not quantized."""
        return self._found.floats

    @property
    def quantizers(self) -> Mapping[str, FakeQuantizer]:
        """Scale owner → quantizer of activations."""
        return self._found.quantizers

    def scales(self) -> list[keras.Variable]:
        """Return the logarithms of the scales."""
        return [
            *(kernel.log_scales for kernel in self.all_kernels),
            *(quantizer.log_scale for quantizer in self.all_quantizers),
        ]

    def call(self, inputs: object, training: bool | None = None) -> Any:
        """Run the model; a call in training mode is one step of the schedule."""
        return self.run_step(inputs) if training else self.run_graph(inputs)

    def run_step(self, inputs: object, seen: Seen | None = None) -> Any:
        """Run one step of the schedule; `seen` as for `run_graph`."""
        observing = None
        if self.schedule.observe_steps:
            observing = self.steps.value < self.schedule.observe_steps
        self.steps.assign_add(1)
        return self.run_graph(inputs, observing, seen)

    def run_graph(
        self, inputs: object, observing: tf.Tensor | None = None, seen: Seen | None = None
    ) -> Any:
        """Run the graph; ranges follow the data if `observing`.

        `seen` gets each node and its results, before they are rounded.
        """
        signature, graph = self.source.given.signature, self.source.given
        weights = {name: kernel(observing) for name, kernel in self.kernels.items()}
        scale_owner = self.source.plan.flow.scale_owner

        def get_variable_value(constant: str) -> tf.Tensor | None:
            if constant in self.kernels:
                return self.kernels[constant].weight.value
            weight = self.floats.get(constant)
            return None if weight is None else weight.value

        walk = Walk(
            graph,
            self.source.rounding,
            lambda node: weights[self.source.find_weight_constant(node)],
            get_variable_value,
            lambda tensor, value, averaged: self.quantizers[scale_owner[tensor]](
                value, observing=observing, averaged=averaged
            ),
            seen,
        )
        values = [
            tf.cast(value, port.dtype)
            for value, port in zip(signature.assign_inputs(inputs), signature.inputs, strict=True)
        ]
        return signature.pack_outputs(
            walk.run_feeds(dict(zip(signature.input_tensors, values, strict=True)))
        )

    def get_config(self) -> dict[str, Any]:
        """Return the name alone: the graph is not part of a file."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: object, custom_objects: object = None) -> SimulatedModel:
        """Refuse: a file holds weights, scales and steps alone."""
        raise ConfigurationError(
            "a file of a simulation must be read by load_weights of a simulation made with the "
            "same plan; call training.quantization_aware, then load_weights(file)"
        )


@dataclass(frozen=True)
class _Parts:
    kernels: Mapping[str, FakeWeight]
    floats: Mapping[str, keras.Variable]
    quantizers: Mapping[str, FakeQuantizer]


def simulate_model(
    reference: TensorFlowModel,
    model: TensorFlowModel,
    plan: ResolvedPlan,
    ranges: Mapping[str, Range],
    schedule: TrainingSchedule,
) -> SimulatedModel:
    """Return the trainable simulation of a model; see `Simulation.simulated`."""
    source = Source(model, plan, ranges, make_plan_rounding(model, plan), reference)
    frozen, learned = _list_frozen_nodes(reference), schedule.learn_scales
    kernels: dict[str, FakeWeight] = {}
    for name, position in source.rounding.weights.items():
        constant, node = source.find_weight_constant(name), model.graph.nodes[name]
        if constant not in kernels:
            value = model.graph.constant_value(constant)
            axes: tuple[int, ...] = (1,)
            if position:
                axes = list_summed_axes(value.ndim, LAYERS[node.op].is_depthwise)
            limit = weight_qmax(plan.plan[name].weight)
            named = f"{_make_layer_name(reference, name)}_weight"
            trains = name not in frozen
            kernels[constant] = FakeWeight(value, axes, limit, learned, trains, named)
    floats = {
        constant: FloatWeight(model.graph.constant_value(constant), reader not in frozen)
        for constant, reader in _iterate_weight_constants(model)
        if constant not in kernels
    }
    _check_trainable_ops(model, [*kernels, *floats])
    quantizers = {
        root: FakeQuantizer(
            QuantParams.of(ranges[root]), learned, f"{_make_layer_name(reference, root)}_result"
        )
        for root in dict.fromkeys(plan.flow.scale_owner.values())
    }
    trained = [kernel.weight.trainable for kernel in kernels.values()]
    if not any(trained) and not any(weight.trained for weight in floats.values()):
        raise ConfigurationError(
            "the model must have float weights to train (trainable=True), got none; unfreeze a "
            "layer, or give the model before it was quantized or frozen"
        )
    return SimulatedModel(source, schedule, kernels, floats, quantizers)


def _make_layer_name(model: TensorFlowModel, node: str) -> str:
    """Return the name of a node's layer, or of the node, as part of the name of a Keras layer."""
    owners = list_node_owners(model.layers.get(node, ()))
    return (owners[-1].name if owners else node).replace("/", "_")


def _check_trainable_ops(model: TensorFlowModel, weights: Iterable[str]) -> None:
    """Raise `ConversionError` for an op that cannot run, or through which no gradient flows."""
    trained = set(weights)
    for name, node in model.graph.nodes.items():
        if node.op == CONSTANT or node.op in PLACEHOLDERS:
            continue
        if not trained.isdisjoint(map(get_node_name, node.input)):
            trained.add(name)
        if not can_be_called(node) or (name in trained and not has_gradient(node)):
            layers = model.layers.get(name)
            location = f"layer {layers[-1].name!r}" if layers else f"op {name!r}"
            raise ConversionError(
                f"training with a plan requires ops with gradients and without loops, got "
                f"{node.op} in {location}; replace the layer, or train the FP32 model"
            )


def _iterate_weight_constants(model: TensorFlowModel) -> Iterator[tuple[str, str]]:
    """Yield the float32 constants that are weights, each with a reader."""
    at = {name: 0 for name in model.structure.tables}
    for name, node in model.graph.nodes.items():
        position = at.get(name, get_op_properties(node).weight)
        if position is None or not model.graph.is_constant(node.input[position]):
            continue
        constant = get_node_name(node.input[position])
        if read_constant_dtype(model.graph.nodes[constant]) == tf.float32:
            yield constant, name


def _list_frozen_nodes(model: TensorFlowModel) -> frozenset[str]:
    fixed = {
        layer.name
        for layer in list_nested_layers(model.original)
        if layer.weights and not layer.trainable
    }
    return frozenset(
        node
        for node, layers in model.layers.items()
        if fixed.intersection(layer.name for layer in list_node_owners(layers))
    )


def finish_simulation(simulation: SimulatedModel) -> TensorFlowModel:
    """Return the converted model with the weights and scales of a simulation."""
    source: Source = simulation.source
    encodings = {root: quantizer.quant_params for root, quantizer in simulation.quantizers.items()}
    ranges = {**source.ranges, **{n: (e.low, e.high) for n, e in encodings.items()}}
    graph, scales = _make_trained_graph(simulation), _read_weight_scales(simulation)
    return convert_frozen_graph(
        source.given.with_graph(graph, weight_scales=scales), source.plan, ranges
    )


def read_trained_model(simulation: SimulatedModel) -> TrainedModel[TensorFlowModel]:
    """Return the trained model in float, and the scales of a simulation."""
    source: Source = simulation.source
    encodings = {
        tensor: simulation.quantizers[owner].quant_params
        for tensor, owner in source.plan.flow.scale_owner.items()
    }
    scales = _read_weight_scales(simulation)
    return TrainedModel(
        source.given.with_graph(_make_trained_graph(simulation)),
        {tensor: (e.low, e.high) for tensor, e in encodings.items()},
        {op: np.ravel(scales[source.find_weight_constant(op)]) for op in source.rounding.weights},
    )


def _make_trained_graph(simulation: SimulatedModel) -> TensorGraph:
    """Return the graph in float with the trained weights."""
    graph = simulation.source.given.graph.copy_graph()
    for name, kernel in simulation.kernels.items():
        graph.add_node(make_constant(name, kernel.weight.numpy()))
    for name, variable in simulation.floats.items():
        graph.add_node(make_constant(name, variable.numpy()))
    return graph


def _read_weight_scales(simulation: SimulatedModel) -> dict[str, Array]:
    """Return constant → the scales of an INT8 weight."""
    return {
        name: np.asarray(kernel.initial.value * tf.exp(kernel.log_scales.value))
        for name, kernel in simulation.kernels.items()
    }
