"""The Keras model of a simulation, for `fit` or the user's own training loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.tensorflow.graph.tensor_graph import Array, NodeDef, node_of
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.training.fake_quantize import (
    FakeQuantizer,
    FakeWeight,
    variable_of,
)
from neural_mp.adaptors.tensorflow.training.simulated_walk import Rounding, Walk
from neural_mp.core.observations import Range
from neural_mp.errors import ConfigurationError
from neural_mp.space import ResolvedPlan

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

    def constant_of(self, node: str) -> str:
        """Return the constant of a node's INT8 weight."""
        return node_of(self.given.graph.nodes[node].input[self.rounding.weights[node]])


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
        self.steps = variable_of(self, 0, "steps", False, dtype="int64")
        variables = [
            variable_of(self, weight.value, name.replace("/", "_"), weight.trained)
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

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Run the model; a call in training mode is one step of the schedule."""
        return self.advanced(inputs) if training else self.walked(inputs)

    def advanced(self, inputs: Any, seen: Seen | None = None) -> Any:
        """Run one step of the schedule; `seen` as for `walked`."""
        observing = None
        if self.schedule.observe_steps:
            observing = self.steps.value < self.schedule.observe_steps
        self.steps.assign_add(1)
        return self.walked(inputs, observing, seen)

    def walked(
        self,
        inputs: Any,
        observing: tf.Tensor | None = None,
        seen: Seen | None = None,
    ) -> Any:
        """Run the graph; ranges follow the data if `observing`.

        `seen` gets each node and its results, before they are rounded.
        """
        signature, graph = self.source.given.signature, self.source.given
        weights = {name: kernel(observing) for name, kernel in self.kernels.items()}
        scale_owner = self.source.plan.flow.scale_owner

        def variable(constant: str) -> tf.Tensor | None:
            if constant in self.kernels:
                return self.kernels[constant].weight.value
            weight = self.floats.get(constant)
            return None if weight is None else weight.value

        walk = Walk(
            graph,
            self.source.rounding,
            lambda node: weights[self.source.constant_of(node)],
            variable,
            lambda tensor, value, averaged: self.quantizers[scale_owner[tensor]](
                value, observing=observing, averaged=averaged
            ),
            seen,
        )
        values = [
            tf.cast(value, port.dtype)
            for value, port in zip(signature.assigned(inputs), signature.inputs, strict=True)
        ]
        return signature.packed(walk.run(dict(zip(signature.input_tensors, values, strict=True))))

    def get_config(self) -> dict[str, Any]:
        """Return the name alone: the graph is not part of a file."""
        return {"name": self.name}

    @classmethod
    def from_config(cls, config: Any, custom_objects: Any = None) -> SimulatedModel:
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
