"""Losses, optimizers and training steps of a simulation, its checkpoints, and the origin of NaN."""

from __future__ import annotations

import io
import math
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.named_graphs import UINT8
from neural_mp.adaptors.common.simulation import (
    BY_OUTPUT,
    LEAST_POWER,
    SPARSE_CROSS_ENTROPY,
    SQUARED_ERROR,
    LossChoice,
    OptimizerChoice,
    are_class_numbers,
    check_targets,
    inputs_and_targets,
)
from neural_mp.adaptors.tensorflow.graph.ops import Trait, has_trait
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    NodeDef,
    get_node_name,
    list_data_inputs,
)
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.training.numerics_trace import resolve_loss_function
from neural_mp.adaptors.tensorflow.training.simulated_model import SimulatedModel
from neural_mp.adaptors.tensorflow.training.simulated_walk import list_node_owners
from neural_mp.errors import ConfigurationError

_KINDS = {
    "SGD": keras.optimizers.SGD,
    "Adam": keras.optimizers.Adam,
    "AdamW": keras.optimizers.AdamW,
}


def choose_loss_function(choice: LossChoice) -> Callable[[Any, Any], Any]:
    """Return a loss as a function of targets and outputs.

    Of cross-entropy, targets such as [n] or [n, 1] are class numbers, others distributions; the
    other losses read one target for each output.
    """
    losses = partial(
        _compute_output_losses if choice.name in BY_OUTPUT else _compute_class_losses, choice
    )
    reduction = tf.reduce_sum if choice.sums_losses else tf.reduce_mean
    return lambda targets, outputs: reduction(losses(targets, outputs))


def _compute_class_losses(choice: LossChoice, targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    is_sparse = choice.name == SPARSE_CROSS_ENTROPY
    if is_sparse or are_class_numbers(targets.shape, outputs.shape):
        losses = keras.losses.sparse_categorical_crossentropy
    else:
        losses = keras.losses.categorical_crossentropy
    return losses(targets, outputs, from_logits=choice.from_logits)


def _compute_output_losses(choice: LossChoice, targets: tf.Tensor, outputs: tf.Tensor) -> tf.Tensor:
    check_targets(targets.shape, outputs.shape)
    expected, actual = (
        tf.expand_dims(tf.cast(tf.reshape(values, tf.shape(outputs)), outputs.dtype), -1)
        for values in (targets, outputs)
    )
    if choice.name == SQUARED_ERROR:
        return keras.losses.mean_squared_error(expected, actual)
    return keras.losses.binary_crossentropy(expected, actual, from_logits=choice.from_logits)


def create_chosen_optimizer(
    model: SimulatedModel, choice: OptimizerChoice
) -> keras.optimizers.Optimizer:
    """Return an optimizer, built for the weights and scales that are trained.

    Raises:
        ConfigurationError: Keras refuses the options.
    """
    try:
        optimizer = _KINDS[choice.name](**choice.options)
    except (TypeError, ValueError) as error:
        raise ConfigurationError(f"the optimizer {choice.name}: {error}") from error
    if choice.decays or choice.name == "AdamW":  # decays by default
        optimizer.exclude_from_weight_decay(var_list=model.scales())
    optimizer.build(model.trainable_variables)
    return optimizer


_ANOTHER = "use another folder"
_ADAM = OptimizerChoice()


class Trainer:
    """Steps of an optimizer on the weights and scales of a simulation.

    A loss is a Keras loss or a function of targets and outputs. Without a loss, batches are inputs
    alone, and the outputs are trained towards those of the FP32 model.
    """

    def __init__(
        self,
        model: SimulatedModel,
        loss: Callable[[Any, Any], Any] | None = None,
        optimizer: OptimizerChoice = _ADAM,
    ) -> None:
        self.model = model
        # AutoGraph is for the user's code: to convert ours would take seconds.
        self.loss = None if loss is None else tf.function(resolve_loss_function(loss))
        self.optimizer = create_chosen_optimizer(model, optimizer)
        self._hidden = _hidden_nan_nodes(model)
        self._compiled = tf.function(self._train_step, reduce_retracing=True, autograph=False)

    def step(self, batch: object, learning_rate: float) -> float:
        """See the protocol."""
        self.optimizer.learning_rate = learning_rate
        inputs, targets = inputs_and_targets(batch, self.loss is not None)
        if self.loss is None:
            reference: TensorFlowModel = self.model.source.reference
            feeds = reference.signature.bind_inputs(tf.nest.map_structure(np.asarray, inputs))
            targets = reference.signature.pack_outputs(reference.run(feeds))
        return float(self._compiled(_to_tensors(inputs), _to_tensors(targets)))

    def _train_step(self, inputs: object, targets: object) -> tf.Tensor:
        variables = self.model.trainable_variables
        values = [*tf.nest.flatten(inputs), *(variable.value for variable in variables)]

        def collect_hidden(node: NodeDef, results: Sequence[tf.Tensor]) -> None:
            if node.name in self._hidden:
                values.extend(results)

        with tf.GradientTape() as tape:
            outputs = self.model.run_step(inputs, collect_hidden)
            if self.loss is None:
                loss = _mean_output_nsr(outputs, targets)
            else:
                loss = tf.cast(tf.reduce_mean(self.loss(targets, outputs)), tf.float32)
        gradients = tape.gradient(loss, variables)
        pairs = [(g, v) for g, v in zip(gradients, variables, strict=True) if g is not None]
        if not pairs:
            raise ConfigurationError("the loss must depend on a weight, got none that does")
        sums = [tf.reduce_sum(tf.cast(v, tf.float32)) for v in values if v.dtype.is_floating]
        norm = tf.cast(tf.linalg.global_norm([g for g, _ in pairs]), tf.float32)
        finite = tf.reduce_all(tf.math.is_finite(tf.stack([loss, norm, *sums])))
        tf.cond(finite, lambda: self._apply_gradients(pairs), lambda: tf.constant(0, tf.int64))
        return tf.where(finite, loss, math.nan)

    def _apply_gradients(self, pairs: Sequence[tuple[Any, Any]]) -> tf.Tensor:
        self.optimizer.apply_gradients(pairs)
        return tf.cast(self.optimizer.iterations.value, tf.int64)

    def first_non_finite(self, batch: object) -> str | None:
        """Return the place of the first NaN or Inf of a batch; None if all numbers are finite."""
        inputs, _ = inputs_and_targets(batch, self.loss is not None)
        if not all(map(_is_finite, tf.nest.flatten(_to_tensors(inputs)))):
            return "the input"
        locations: list[str] = []

        def locate_non_finite(node: NodeDef, results: Sequence[tf.Tensor]) -> None:
            if not locations and not all(map(_is_finite, results)):
                locations.append(_describe_location(self.model.source.given, node))

        self.model.run_graph(_to_tensors(inputs), seen=locate_non_finite)
        return next(iter(locations), None)

    def save_state(self) -> bytes:
        """Return weights, scales, optimizer and random state, for `load_state`."""
        variables = [*self.model.variables, *self.optimizer.variables]
        stored = io.BytesIO()
        np.savez(stored, *[np.asarray(variable.value) for variable in variables])
        return stored.getvalue()

    def load_state(self, state: bytes, *, resume: bool = False) -> None:
        """Restore a result of `state`; see the protocol. Training draws no random numbers."""
        variables = [*self.model.variables, *self.optimizer.variables]
        try:
            with np.load(io.BytesIO(state), allow_pickle=False) as parts:
                values = [parts[f"arr_{number}"] for number in range(len(variables))]
                if len(parts.files) != len(variables):
                    raise ValueError(f"{len(parts.files)} arrays for {len(variables)} variables")
            for variable, value in zip(variables, values, strict=True):
                if tuple(variable.shape) != value.shape:
                    raise ValueError(f"{variable.path} has shape {tuple(variable.shape)}")
        except (ValueError, KeyError, OSError, EOFError, pickle.UnpicklingError) as error:
            raise ConfigurationError(
                f"the checkpoint must be of the same model and plan: {error}; {_ANOTHER}"
            ) from error
        for variable, value in zip(variables, values, strict=True):
            variable.assign(value)


def _hidden_nan_nodes(model: SimulatedModel) -> frozenset[str]:
    """Return the nodes whose NaN may not reach the loss, as the next kernel hides it."""
    graph, rounding = model.source.given.graph, model.source.rounding
    nodes = {name for name, kind in rounding.results.items() if kind == UINT8}
    for name, node in graph.nodes.items():
        inputs = list_data_inputs(node)
        positions = (
            range(len(inputs)) if has_trait(node, Trait.HIDES_NAN) else rounding.reads.get(name, ())
        )
        nodes.update(get_node_name(inputs[position]) for position in positions)
    return frozenset(nodes)


def _describe_location(model: TensorFlowModel, node: NodeDef) -> str:
    kind, name = "the result", node.name
    if node.op == CONSTANT:
        kind = "a weight"
        readers = (
            n.name for n in model.graph.nodes.values() if name in map(get_node_name, n.input)
        )
        name = next(readers, name)
    owners = list_node_owners(model.layers.get(name, ()))
    return f"{kind} of layer {owners[-1].name if owners else name!r}"


def _to_tensors(values: object) -> Any:
    return tf.nest.map_structure(tf.convert_to_tensor, values)


def _is_finite(value: tf.Tensor) -> bool:
    return not value.dtype.is_floating or bool(tf.reduce_all(tf.math.is_finite(value)))


def _mean_output_nsr(outputs: object, reference: object) -> tf.Tensor:
    pairs = zip(tf.nest.flatten(outputs), tf.nest.flatten(reference), strict=True)
    noises = []
    for output, expected in pairs:
        if output.dtype.is_floating:
            output, expected = tf.cast(output, tf.float32), tf.cast(expected, tf.float32)
            power = tf.maximum(tf.reduce_sum(tf.square(expected)), LEAST_POWER)
            noises.append(tf.reduce_sum(tf.square(output - expected)) / power)
    if not noises:
        raise ConfigurationError("self-distillation requires a float output, got none; set loss")
    return tf.reduce_mean(tf.stack(noises))
