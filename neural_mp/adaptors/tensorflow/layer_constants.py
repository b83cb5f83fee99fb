"""The constants of layers, to be scaled channel by channel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from neural_mp.adaptors.common.channel_scaling import Array, Layer, LayerChange
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import (
    Consumers,
    NodeDef,
    TensorGraph,
    constant_shape,
    data_inputs,
    node_of,
)

_SUMS = ("Add", "AddV2", "Sub")


@dataclass(frozen=True)
class _Norm:
    """A normalization over the last axis, as the ops it is made of.

    Attributes:
        gamma: the product of the inverse deviation and the constant that scales.
        shifts: additions with a constant that shifts.
    """

    gamma: str
    shifts: tuple[str, ...]


def layers(model: TensorFlowModel) -> dict[str, Layer]:
    """Op → its constants."""
    graph = model.graph
    found = {name: _layer(model, name) for name in model.structure.fusion_groups}
    for name, norm in _norms(model).items():
        found[name] = Layer(name, lambda norm=norm: _scale(graph, norm), pooled=True)  # type: ignore[misc]
    return found


def channel_keepers(model: TensorFlowModel) -> frozenset[str]:
    """Reshapings that leave the last axis as it is."""
    kept = set()
    for name, node in model.graph.nodes.items():
        if node.op != "Reshape" or name not in model.structure.agnostic_ops:
            continue
        before, after = model.shapes[node_of(node.input[0])][0], model.shapes[name][0]
        if before and after and before[-1] is not None and before[-1] == after[-1]:
            kept.add(name)
    return frozenset(kept)


def _layer(model: TensorFlowModel, name: str) -> Layer:
    graph, node = model.graph, model.graph.nodes[name]

    def weight() -> Array:
        value = graph.constant(node.input[1])
        assert value is not None
        # Of a depthwise convolution the output channels are two axes: one of one-channel groups.
        return value.reshape(*value.shape[:2], 1, -1) if depthwise else value

    depthwise = node.op == "DepthwiseConv2dNative"
    bias = model.structure.fusion_groups[name].bias
    result = bias.ops[-1] if bias else name
    if node.op == "MatMul":
        across = node.attr["transpose_b"].b
        return Layer(result, weight, *((0, 1) if across else (1, 0)), pooled=True)
    groups = constant_shape(graph[node.input[1]])[2] if depthwise else 1
    return Layer(result, weight, outputs=3, inputs=2, groups=groups, pooled=True)


def _scale(graph: TensorGraph, norm: _Norm) -> Array:
    value = graph.constant(_constant_input(graph, graph.nodes[norm.gamma]) or "")
    assert value is not None
    return value.reshape(-1)


def _constant_input(graph: TensorGraph, node: NodeDef) -> str | None:
    """The one input of two that is a vector of constants, all its axes but the last of length 1."""
    constants = [tensor for tensor in data_inputs(node) if graph.is_constant(tensor)]
    if len(constants) != 1:
        return None
    sizes = constant_shape(graph[constants[0]])
    return constants[0] if sizes and set(sizes[:-1]) <= {1} else None


def _norms(model: TensorFlowModel) -> dict[str, _Norm]:
    """Sum that has the result of a normalization → what it is made of."""
    graph = model.graph
    consumers = graph.consumers()
    found = {}
    for name, node in graph.nodes.items():
        inverse = node.op == "Mul" and any(graph[t].op == "Rsqrt" for t in data_inputs(node))
        if inverse and _constant_input(graph, node) is not None:
            result = _result(graph, consumers, name, model.output_nodes)
            if result is not None:
                found[result[0]] = result[1]
    return found


def _result(
    graph: TensorGraph, consumers: Consumers, gamma: str, outputs: frozenset[str]
) -> tuple[str, _Norm] | None:
    """Follows x · γ/σ and -μ · γ/σ to their sum, constants added on the way.

    None where anything else reads one of these.
    """
    terms = {reader for reader, _ in consumers[gamma]}
    alone = len(terms) == len(consumers[gamma]) and gamma not in outputs
    if not terms or not alone or any(graph.nodes[term].op != "Mul" for term in terms):
        return None
    shifts: list[str] = []
    while len(terms) > 1 or not shifts:
        readers = {reader for term in terms for reader, _ in consumers[term]}
        ready = sorted(r for r in readers if _is_sum(graph, r, terms))
        if not ready:
            break
        parts = [node_of(tensor) for tensor in data_inputs(graph.nodes[ready[0]])]
        summed = terms.intersection(parts)
        if any(len(consumers[part]) != 1 or part in outputs for part in summed):
            break
        if len(summed) < len(parts):
            shifts.append(ready[0])
        terms = (terms - summed) | {ready[0]}
    return (terms.pop(), _Norm(gamma, tuple(shifts))) if len(terms) == 1 else None


def _is_sum(graph: TensorGraph, name: str, terms: set[str]) -> bool:
    """Whether an addition is of terms, or of one and a vector of constants."""
    node = graph.nodes[name]
    parts = [node_of(tensor) for tensor in data_inputs(node)]
    return (
        node.op in _SUMS
        and any(part in terms for part in parts)
        and all(part in terms or _constant_input(graph, node) is not None for part in parts)
    )


def with_layers(model: TensorFlowModel, changes: Mapping[str, LayerChange]) -> TensorFlowModel:
    """The model with other constants in some of its layers."""
    graph, known, norms = model.graph.copy(), layers(model), _norms(model)
    for name, change in changes.items():
        weight = change.weight(known[name])
        if name in norms:
            _put(graph, norms[name].gamma, weight, "scale")
            for shift in norms[name].shifts:
                _put_bias(graph, shift, change)
            continue
        node = graph.nodes[name]
        shape = constant_shape(graph[node.input[1]])
        _put_at(graph, name, 1, weight.reshape(shape), "weight")
        if known[name].result != name:
            _put_bias(graph, known[name].result, change)
    inputs = [port.tensor for port in model.signature.inputs]
    outputs = [port.tensor for port in model.signature.outputs]
    return replace(model, graph=graph.pruned(outputs, inputs), original=None)


def _put_bias(graph: TensorGraph, name: str, change: LayerChange) -> None:
    value = graph.constant(_constant_input(graph, graph.nodes[name]) or "")
    assert value is not None
    _put(graph, name, change.bias(value.reshape(-1), value.size), "bias")


def _put(graph: TensorGraph, name: str, value: Array, stem: str) -> None:
    """Put a vector in the place of the one that a node reads."""
    node = graph.nodes[name]
    tensor = _constant_input(graph, node)
    assert tensor is not None
    before = graph.constant(tensor)
    assert before is not None
    position = [node_of(read) for read in node.input].index(node_of(tensor))
    _put_at(graph, name, position, value.reshape(before.shape), stem)


def _put_at(graph: TensorGraph, name: str, position: int, value: Array, stem: str) -> None:
    constant = graph.put_constant(f"{name}/repaired_{stem}", value)
    graph.edit(name).input[position] = constant
