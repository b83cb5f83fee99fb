"""From what a user hands over to a prepared graph with its signature."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from neural_mp.adaptors.common.input_spec import GivenInputs
from neural_mp.adaptors.tensorflow import sources
from neural_mp.adaptors.tensorflow.freeze import no_constant
from neural_mp.adaptors.tensorflow.keras_layers import Origins
from neural_mp.adaptors.tensorflow.left_alone import left_alone
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.prepare import prepare
from neural_mp.adaptors.tensorflow.served_signature import ServedSignature
from neural_mp.adaptors.tensorflow.tensor_graph import PLACEHOLDERS, TensorGraph, node_of
from neural_mp.adaptors.tensorflow.unknown_rank import (
    check_made_up,
    with_told_ranks,
    with_told_shapes,
)
from neural_mp.errors import ModelLoadError


def load(source: Any, wanted: GivenInputs) -> TensorFlowModel:
    """Take in a model.

    Args:
        source: a path or an object of TensorFlow's or Keras's.
        wanted: what the user says of its inputs and outputs.

    Raises:
        ModelLoadError: it cannot be read, is not whole or holds what cannot be frozen.
        ConfigurationError: it has no input or output of a name that was given.
        DataError: the example does not fit it; or there is none, and it does not say what it takes.
    """
    taken = sources.read(source, wanted)
    signature = taken.signature.choosing(wanted.names, wanted.outputs)
    _refuse_state(taken.graph, signature)
    told = with_told_shapes(taken.graph, signature)
    signature = with_told_ranks(signature, told)
    origins = Origins.of(taken.graph, taken.scopes)
    prepared, warnings = prepare(taken.graph, signature)
    feeds, unsure = wanted.feeds(told if wanted.example is None else signature)
    if wanted.example is None:
        check_made_up(prepared, signature, feeds)
    warnings = [*taken.warnings, *warnings, *left_alone(prepared), *unsure]
    return TensorFlowModel(
        prepared,
        signature,
        feeds,
        {},
        taken.original,
        tuple(warnings),
        layers=origins.layers(prepared),
    )


#: What a graph holds that keeps values outside of it.
_STATE = (
    *("VarHandleOp", "VariableV2", "Variable", "ReadVariableOp", "HashTableV2"),
    *("MutableHashTableV2", "LookupTableFindV2"),
)


def _refuse_state(graph: TensorGraph, signature: ServedSignature) -> None:
    needed = graph.pruned(signature.output_tensors, signature.input_tensors)
    fed = set(map(node_of, signature.input_tensors))
    for node in needed.nodes.values():
        if node.op in _STATE:
            raise ModelLoadError(
                f"node {node.name!r} ({node.op}) keeps its values outside of the graph; give the "
                f"SavedModel folder or the Keras model, or a graph whose variables were frozen"
            )
        if node.op in PLACEHOLDERS and node.name not in fed:
            kind = tf.as_dtype(node.attr["dtype"].type)
            if kind in (tf.resource, tf.variant):
                raise no_constant(node.name)
            if node.op != "PlaceholderWithDefault":
                raise ModelLoadError(
                    f"the outputs need the input {node.name!r}, which is not among the inputs "
                    f"({', '.join(sorted(fed)) or 'none'})"
                )
