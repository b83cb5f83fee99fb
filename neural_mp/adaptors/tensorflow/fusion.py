"""What one integer kernel runs together: a layer, its bias, a residual sum, an activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.tensorflow.fold import ADDITIONS, LAYERS, only_reader
from neural_mp.adaptors.tensorflow.gelu import find_gelu
from neural_mp.adaptors.tensorflow.nodes import (
    PLACEHOLDERS,
    Consumers,
    TensorGraph,
    data_inputs,
    node_of,
    text_attribute,
)
from neural_mp.adaptors.tensorflow.shapes import Shapes

#: What may follow the bias of a layer within its kernel.
_ACTIVATIONS = {
    "Conv2D": ("Relu", "Relu6"),
    "DepthwiseConv2dNative": ("Relu", "Relu6"),
    "MatMul": ("Relu", "Relu6", "Tanh", "Sigmoid", "Elu"),
}


@dataclass(frozen=True)
class Step:
    """One thing a kernel does behind the product.

    Attributes:
        kind: the kernel's word: `BiasAdd`, `Sum`, or an activation.
        nodes: the nodes it stands for, the last of which has the result.
        other: of a sum, the tensor that is added.
    """

    kind: str
    nodes: tuple[str, ...]
    other: str | None = None

    @property
    def result(self) -> str:
        """The node that has the result."""
        return self.nodes[-1]


@dataclass(frozen=True)
class FusionGroup:
    """A layer and what its kernel can do behind it."""

    head: str
    steps: tuple[Step, ...]

    @property
    def members(self) -> tuple[str, ...]:
        """The nodes that run along with the layer."""
        return tuple(name for step in self.steps for name in step.nodes)


def find_fusion_groups(
    graph: TensorGraph, outputs: frozenset[str], shapes: Shapes
) -> dict[str, FusionGroup]:
    """Layer → its fusion group, for every layer with a constant weight.

    Of two layers that are added, the sum goes to the later one.
    """
    consumers = graph.consumers()
    finder = _Finder(graph, outputs, shapes, consumers, _open_inputs(graph), set())
    found: dict[str, FusionGroup] = {}
    for name, node in reversed(list(graph.nodes.items())):
        if node.op in LAYERS and graph.is_constant(node.input[1]):
            found[name] = FusionGroup(name, tuple(finder.steps(name)))
            finder.taken.update(found[name].members)
    return dict(reversed(found.items()))


def _open_inputs(graph: TensorGraph) -> dict[str, frozenset[str]]:
    """Node → the placeholders that it is computed from."""
    found: dict[str, frozenset[str]] = {}
    for name, node in graph.nodes.items():
        sources = (found.get(node_of(tensor), frozenset()) for tensor in node.input)
        own = frozenset({name} if node.op in PLACEHOLDERS else ())
        found[name] = own.union(*sources)
    return found


@dataclass(frozen=True)
class _Finder:
    graph: TensorGraph
    outputs: frozenset[str]
    shapes: Shapes
    consumers: Consumers
    fed_by: Mapping[str, frozenset[str]]
    taken: set[str]

    def steps(self, head: str) -> list[Step]:
        kind = self.graph.nodes[head].op
        steps: list[Step] = []
        last = self._bias(head, steps)
        if kind == "Conv2D":
            last = self._sum(last, steps)
        if kind == "MatMul" and last not in self.outputs:
            gelu = find_gelu(self.graph, self.consumers, last)
            if gelu is not None and self._free(gelu.nodes):
                return [*steps, Step(gelu.kind, gelu.nodes)]
        following = self._next(last)
        if following is not None:
            node = self.graph.nodes[following]
            if node.op in _ACTIVATIONS[kind]:
                steps.append(Step(node.op, (following,)))
        return steps

    def _free(self, nodes: tuple[str, ...]) -> bool:
        return self.outputs.isdisjoint(nodes[:-1]) and self.taken.isdisjoint(nodes)

    def _next(self, name: str) -> str | None:
        """The only reader of a node that is no output itself."""
        if name in self.outputs:
            return None
        following = only_reader(self.graph, self.consumers, name)
        return None if following is None or following[0].name in self.taken else following[0].name

    def _bias(self, name: str, steps: list[Step]) -> str:
        following = self._next(name)
        if following is None:
            return name
        node = self.graph.nodes[following]
        constant = node.op == "BiasAdd" and self.graph.is_constant(node.input[1])
        if not constant or text_attribute(node, "data_format").startswith("NC"):
            return name
        steps.append(Step("BiasAdd", (following,)))
        return following

    def _sum(self, name: str, steps: list[Step]) -> str:
        following = self._next(name)
        if following is None or self.graph.nodes[following].op not in ADDITIONS:
            return name
        first, second = data_inputs(self.graph.nodes[following])
        other = second if first == name else first
        if other == name or ":" in other or not self._same_sizes(name, other):
            return name
        if self.graph.is_constant(other):
            return name
        steps.append(Step("Sum", (following,), other))
        return following

    def _same_sizes(self, one: str, other: str) -> bool:
        """Whether two tensors are sure to be of one shape, so that nothing is broadcast.

        Of tensors that come from several inputs nothing is sure: the batches of those may differ.
        """
        return self.shapes.alike(one, other) and len(self.fed_by[one] | self.fed_by[other]) <= 1


def non_negative(graph: TensorGraph) -> frozenset[str]:
    """Nodes whose results are never negative, whatever the data."""
    found: set[str] = set()
    for name, node in graph.nodes.items():
        sources = data_inputs(node)
        if (
            node.op in _NEVER_NEGATIVE
            or (node.op in _KEEP_SIGN and sources and sources[0] in found)
            or (node.op == "ConcatV2" and all(source in found for source in sources[:-1]))
        ):
            found.add(name)
        elif node.op == "Maximum":
            limits = [graph.constant(source) for source in sources]
            if any(limit is not None and np.min(limit, initial=0) >= 0 for limit in limits):
                found.add(name)
    return frozenset(found)


_NEVER_NEGATIVE = (
    *("Relu", "Relu6", "Sigmoid", "Softmax", "Softplus", "Exp", "Square", "Abs", "Sqrt", "Rsqrt"),
    *("SquaredDifference", "LogicalNot"),
)
_KEEP_SIGN = (
    *("MaxPool", "AvgPool", "Mean", "Max", "Min", "Sum", "Pad", "Reshape", "Squeeze", "ExpandDims"),
    *("Transpose", "StridedSlice", "Slice", "SpaceToDepth", "DepthToSpace", "Identity"),
    *("ResizeNearestNeighbor", "ResizeBilinear", "SpaceToBatchND", "BatchToSpaceND"),
)
