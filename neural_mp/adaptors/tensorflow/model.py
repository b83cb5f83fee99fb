"""A TensorFlow model as the adaptor holds it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import tensorflow as tf

from neural_mp.adaptors.common.op_outputs import OutputLocation
from neural_mp.adaptors.common.signature import Signature
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.adaptors.tensorflow.function_constants import tie_constants
from neural_mp.adaptors.tensorflow.fusion import GraphStructure, structure
from neural_mp.adaptors.tensorflow.runtime import Runner, imported
from neural_mp.adaptors.tensorflow.shape_inference import Shapes, shapes
from neural_mp.adaptors.tensorflow.tensor_graph import (
    CONSTANT,
    LARGE,
    Array,
    NodeDef,
    TensorGraph,
    constant_bytes,
    node_of,
    without,
)
from neural_mp.core.graph import Layer
from neural_mp.util.validators import list_of, record, string

#: The signature that TensorFlow Serving calls unless told otherwise.
DEFAULT_KEY = "serving_default"


@dataclass(frozen=True)
class ServedSignature(Signature):
    """The inputs and outputs of a TensorFlow model.

    Attributes:
        keys: the names of the signature in a SavedModel.
    """

    keys: tuple[str, ...] = (DEFAULT_KEY,)

    def to_dict(self) -> dict[str, Any]:
        """Plain strings and numbers, as written to JSON."""
        return {**super().to_dict(), "keys": self.keys}

    @classmethod
    def from_dict(cls, data: object) -> ServedSignature:
        """Read back what `to_dict` wrote.

        Raises:
            NeuralMPError: it was not written so.
        """
        return replace(super().from_dict(data), **_KEYS(data))


_KEYS = record({"keys": list_of(string)})


@dataclass(frozen=True, eq=False)
class TensorFlowModel:
    """A graph that runs by itself: weights are constants in it.

    Attributes:
        graph: the nodes.
        signature: the inputs and outputs.
        example: tensor → array, inputs it can be run on.
        ops: of a converted model, node that may run → the op of the untouched graph that its time
            counts for, where that has another name.
        original: the user's own object, of a model that was not converted.
        warnings: what the user should know.
        counts: the conversions that were put in.
        layers: node → the layers of Keras that it comes from, where that is known.
        written: of a converted model, node → the op that it was written for, where that has another
            name; no op (an empty text) for a conversion that bears the name of one.
        results: of a converted model, op of the untouched graph → where its result is; ops that run
            within the kernel of another have none.
    """

    graph: TensorGraph
    signature: ServedSignature
    example: dict[str, Array]
    ops: dict[str, str]
    original: Any = None
    warnings: tuple[str, ...] = ()
    counts: ConversionCounts = ConversionCounts()
    layers: Mapping[str, tuple[Layer, ...]] = field(default_factory=dict)
    written: Mapping[str, str] = field(default_factory=dict)
    results: Mapping[str, OutputLocation] = field(default_factory=dict)

    @cached_property
    def runner(self) -> Runner:
        """A session with the graph in it, made when it is first needed."""
        return Runner(*self._without(self._tables(self._large())))

    def without_weights(self) -> tuple[tf.Graph, dict[str, Array]]:
        """The graph with placeholders for its large constants, and what these hold."""
        return self._without(self._large())

    def _without(self, constants: Collection[str]) -> tuple[tf.Graph, dict[str, Array]]:
        held = {name: self.graph.value(name) for name in constants}
        return imported(without(self.graph, constants)), held

    def _large(self) -> list[str]:
        # What waits for an iteration of a loop cannot be fed.
        return [
            name
            for name, node in self.graph.nodes.items()
            if constant_bytes(node) > LARGE and not node.input
        ]

    def _tables(self, constants: Iterable[str]) -> list[str]:
        """Constants of which ops read single rows: no kernel runs faster for knowing them."""
        read: dict[str, set[bool]] = {}
        for node in self.graph.nodes.values():
            for position, tensor in enumerate(node.input):
                read.setdefault(tensor, set()).add(node.op == "GatherV2" and position == 0)
        kept = self.output_nodes
        return [name for name in constants if read.get(name) == {True} and name not in kept]

    @cached_property
    def shapes(self) -> Shapes:
        """Node → the shapes of its results."""
        return shapes(self.graph)

    @cached_property
    def structure(self) -> GraphStructure:
        """What the graph is made of."""
        return structure(self.graph, self.output_nodes, self.shapes)

    @cached_property
    def counted_for(self) -> Mapping[str, str]:
        """Node that may run → the op its time counts for, such as the layer it runs along with."""
        return self.ops or self.structure.layer_of

    @cached_property
    def op_nodes(self) -> tuple[NodeDef, ...]:
        """The nodes that compute something."""
        fed = {node_of(tensor) for tensor in self.signature.input_tensors}
        return tuple(
            node
            for name, node in self.graph.nodes.items()
            if node.op not in (CONSTANT, "NoOp") and name not in fed
        )

    @property
    def output_nodes(self) -> frozenset[str]:
        """The nodes whose results leave the graph."""
        return frozenset(map(node_of, self.signature.output_tensors))

    def with_graph(self, graph: TensorGraph, **changes: Any) -> TensorFlowModel:
        """The model with another graph, less what no output needs, and with other changes."""
        signature = self.signature
        graph = graph.pruned(signature.output_tensors, signature.input_tensors)
        tie_constants(graph)
        return replace(self, graph=graph, original=None, **changes)

    def run(self, feeds: dict[str, Array]) -> list[Any]:
        """The outputs, in the order of the signature."""
        return self.runner(feeds, self.signature.output_tensors)
