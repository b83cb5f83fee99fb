"""Which layers of a Keras model the ops of its graph come from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from neural_mp.adaptors.tensorflow.layer_folding import LAYERS
from neural_mp.adaptors.tensorflow.tensor_graph import TensorGraph, data_inputs, node_of
from neural_mp.core.graph import Layer

#: How far back from an op with another's name the op itself may have been: bias, scaling, norm.
_FURTHEST = 8

#: Prefix of the names of a layer's ops → the layer. TensorFlow puts numbers behind the names of
#: layers, which may look like those of other layers.
Scopes = Mapping[str, Layer]


@contextmanager
def watched(model: Any) -> Iterator[Scopes]:
    """For a `with` block that calls a model: fills in the scopes that its layers run in."""
    scopes: dict[str, Layer] = {}
    layers = [layer for layer in _layers_in(model) if layer is not model]
    before = [(layer, vars(layer).get("call")) for layer in layers]
    try:
        for layer in layers:
            # Past Keras's own setting of attributes, which refuses some in a model that is built.
            vars(layer)["call"] = _noting(layer, scopes)
        yield scopes
    finally:
        for layer, own in before:
            vars(layer).pop("call", None)
            if own is not None:
                vars(layer)["call"] = own


def _layers_in(model: Any) -> list[Any]:
    """All layers of a model, also those inside of others; of Keras 3 alone."""
    if not hasattr(model, "_flatten_layers") or type(model).__module__.startswith("tf_keras"):
        return []
    return list(model._flatten_layers())


def _noting(layer: Any, scopes: dict[str, Layer]) -> Any:
    run = layer.call

    def call(*args: Any, **kwargs: Any) -> Any:
        scope = tf.compat.v1.get_default_graph().get_name_scope()
        # A layer that opens no scope of its own would get the ops of the one around it.
        if scope.rpartition("/")[2].startswith(layer.name):
            scopes.setdefault(scope, Layer(layer.name, type(layer).__name__))
        return run(*args, **kwargs)

    return call


@dataclass(frozen=True)
class Origins:
    """Where the nodes of a graph come from, kept from before it was simplified."""

    scopes: Scopes
    types: Mapping[str, str]
    read: Mapping[str, tuple[str, ...]]

    @classmethod
    def of(cls, graph: TensorGraph, scopes: Scopes) -> Origins:
        """What a graph says before anything is folded in it."""
        nodes = graph.nodes if scopes else {}
        return cls(
            scopes,
            {name: node.op for name, node in nodes.items()},
            {name: tuple(map(node_of, data_inputs(node))) for name, node in nodes.items()},
        )

    def layers(self, graph: TensorGraph) -> dict[str, tuple[Layer, ...]]:
        """Node of the simplified graph → the layers it comes from, outer ones first."""
        if not self.scopes:
            return {}
        found = {}
        for name, node in graph.nodes.items():
            # TensorFlow folds what is behind a layer into it, and the layer gets the name of that.
            taken_in = self._layer_before(name, node.op) if node.op in LAYERS else None
            names = [name] if taken_in is None else [taken_in, name]
            layers = dict.fromkeys(layer for each in names for layer in self._around(each))
            if layers:
                found[name] = tuple(layers)
        return found

    def _around(self, name: str) -> Iterator[Layer]:
        parts = name.split("/")
        for end in range(1, len(parts)):
            layer = self.scopes.get("/".join(parts[:end]))
            if layer is not None:
                yield layer

    def _layer_before(self, name: str, kind: str) -> str | None:
        """The layer of a kind nearest before an op that had the name; None if it was that layer."""
        near: tuple[str, ...] = (name,)
        if self.types.get(name) in (None, kind):
            return None
        for _ in range(_FURTHEST):
            near = tuple(dict.fromkeys(source for n in near for source in self.read.get(n, ())))
            layers = [n for n in near if self.types.get(n) == kind]
            if layers:
                return layers[0]
        return None
