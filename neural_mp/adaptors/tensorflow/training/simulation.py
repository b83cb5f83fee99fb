"""Trainable simulation of a converted model, made from the graph that conversion reads.

The graph, with batch norms folded, runs in float and rounds where the converted graph does. Trained
numbers are converted by the same `convert.write`, so what is trained is what runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import tensorflow as tf

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.simulation import TrainingSchedule
from neural_mp.adaptors.tensorflow.capture.keras_models import layers_in
from neural_mp.adaptors.tensorflow.graph.ops import LAYERS, PLACEHOLDERS, op_type
from neural_mp.adaptors.tensorflow.graph.tensor_graph import (
    CONSTANT,
    constant_dtype,
    make_constant,
    node_of,
)
from neural_mp.adaptors.tensorflow.kernels.convert import write
from neural_mp.adaptors.tensorflow.kernels.integer_kernels import summed_axes
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.training.simulated_model import (
    FakeQuantizer,
    FakeWeight,
    FloatWeight,
    SimulatedModel,
    Source,
)
from neural_mp.adaptors.tensorflow.training.simulated_walk import (
    can_be_called,
    has_gradient,
    owners_of,
    rounding_of,
)
from neural_mp.core.int8_accumulation import weight_qmax
from neural_mp.core.observations import Range
from neural_mp.errors import ConfigurationError, ConversionError
from neural_mp.space import ResolvedPlan


def simulated(
    reference: TensorFlowModel,
    model: TensorFlowModel,
    plan: ResolvedPlan,
    ranges: Mapping[str, Range],
    schedule: TrainingSchedule,
) -> SimulatedModel:
    """Return the trainable simulation of a model; see `Simulation.simulated`."""
    source = Source(model, plan, ranges, rounding_of(model, plan), reference)
    frozen, learned = _frozen_nodes(reference), schedule.learn_scales
    kernels: dict[str, FakeWeight] = {}
    for name, position in source.rounding.weights.items():
        constant, node = source.constant_of(name), model.graph.nodes[name]
        if constant not in kernels:
            value = model.graph.value(constant)
            axes: tuple[int, ...] = (1,)
            if position:
                axes = summed_axes(value.ndim, LAYERS[node.op].is_depthwise)
            limit = weight_qmax(plan.plan[name].weight)
            named = f"{_layer_name(reference, name)}_weight"
            trains = name not in frozen
            kernels[constant] = FakeWeight(value, axes, limit, learned, trains, named)
    floats = {
        constant: FloatWeight(model.graph.value(constant), reader not in frozen)
        for constant, reader in _weight_constants(model)
        if constant not in kernels
    }
    _check_trainable_ops(model, [*kernels, *floats])
    quantizers = {
        root: FakeQuantizer(
            QuantParams.of(ranges[root]), learned, f"{_layer_name(reference, root)}_result"
        )
        for root in dict.fromkeys(plan.flow.scale_owner.values())
    }
    trained = [*(kernel.weight.trainable for kernel in kernels.values())]
    if not any([*trained, *(weight.trained for weight in floats.values())]):
        raise ConfigurationError(
            "the model must have float weights to train (trainable=True), got none; unfreeze a "
            "layer, or give the model before it was quantized or frozen"
        )
    return SimulatedModel(source, schedule, kernels, floats, quantizers)


def _layer_name(model: TensorFlowModel, node: str) -> str:
    """Return the name of a node's layer, or of the node, as part of the name of a Keras layer."""
    owners = owners_of(model.layers.get(node, ()))
    return (owners[-1].name if owners else node).replace("/", "_")


def _check_trainable_ops(model: TensorFlowModel, weights: Iterable[str]) -> None:
    """Raise `ConversionError` for an op that cannot run, or through which no gradient flows."""
    trained = set(weights)
    for name, node in model.graph.nodes.items():
        if node.op == CONSTANT or node.op in PLACEHOLDERS:
            continue
        if not trained.isdisjoint(map(node_of, node.input)):
            trained.add(name)
        if not can_be_called(node) or (name in trained and not has_gradient(node)):
            layers = model.layers.get(name)
            location = f"layer {layers[-1].name!r}" if layers else f"op {name!r}"
            raise ConversionError(
                f"training with a plan requires ops with gradients and without loops, got "
                f"{node.op} in {location}; replace the layer, or train the FP32 model"
            )


def _weight_constants(model: TensorFlowModel) -> Iterator[tuple[str, str]]:
    """Yield the float32 constants that are weights, each with a reader."""
    at = {name: 0 for name in model.structure.tables}
    for name, node in model.graph.nodes.items():
        position = at.get(name, op_type(node).weight)
        if position is None or not model.graph.is_constant(node.input[position]):
            continue
        constant = node_of(node.input[position])
        if constant_dtype(model.graph.nodes[constant]) == tf.float32:
            yield constant, name


def _frozen_nodes(model: TensorFlowModel) -> frozenset[str]:
    fixed = {
        layer.name for layer in layers_in(model.original) if layer.weights and not layer.trainable
    }
    nodes = set()
    for node, layers in model.layers.items():
        if fixed.intersection(layer.name for layer in owners_of(layers)):
            nodes.add(node)
    return frozenset(nodes)


def finished(simulation: SimulatedModel) -> TensorFlowModel:
    """Return the converted model with the weights and scales of a simulation."""
    source: Source = simulation.source
    graph = source.given.graph.copy()
    for name, kernel in simulation.kernels.items():
        graph.add(make_constant(name, kernel.weight.numpy()))
    for name, variable in simulation.floats.items():
        graph.add(make_constant(name, variable.numpy()))
    encodings = {root: quantizer.encoding for root, quantizer in simulation.quantizers.items()}
    ranges = {**source.ranges, **{n: (e.low, e.high) for n, e in encodings.items()}}
    scales = {name: kernel.scales() for name, kernel in simulation.kernels.items()}
    return write(source.given.with_graph(graph, weight_scales=scales), source.plan, ranges)
