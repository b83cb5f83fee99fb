"""From what a user hands over to a prepared graph with its signature."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

from neural_mp.adaptors.common.given_inputs import names_in, names_or_examples
from neural_mp.adaptors.common.signature import example_for
from neural_mp.adaptors.tensorflow import sources
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.nodes import PLACEHOLDERS, TensorGraph, node_of
from neural_mp.adaptors.tensorflow.prepare import prepare
from neural_mp.adaptors.tensorflow.served_signature import ServedSignature
from neural_mp.errors import ModelLoadError


def load(source: Any, inputs: Any, outputs: Any, example: Any) -> TensorFlowModel:
    """Take in a model.

    Args:
        source: a path or an object of TensorFlow's or Keras's.
        inputs: names of the inputs in the order the data has them, or example arrays.
        outputs: names of the outputs to keep.
        example: the inputs of one batch of the user's data, if there is any.

    Raises:
        ModelLoadError: it cannot be read, is not whole or holds what cannot be frozen.
        ConfigurationError: it has no input or output of a name that was given.
        DataError: the example does not fit it.
    """
    names, given = names_or_examples(inputs)
    example = given if given is not None else example
    taken = sources.read(source, names, names_in(outputs, "outputs"), example)
    graph, signature = TensorGraph.from_graph_def(taken.graph), taken.signature
    _refuse_state(graph, signature)
    prepared, warnings = prepare(graph, signature)
    feeds = signature.bind(example) if example is not None else example_for(signature)
    unknown = [p for p in signature.inputs if p.shape is None or None in p.shape[1:]]
    if example is None and unknown:
        warnings.append(
            f"no data was given, so unknown sizes of the input {unknown[0]} were taken to be 1; "
            f"set inputs to an example array to be sure"
        )
    return TensorFlowModel(
        prepared,
        signature,
        feeds,
        {},
        taken.original,
        (*taken.warnings, *warnings),
    )


#: What a graph holds that keeps values outside of it.
_STATE = (
    "VarHandleOp",
    "VariableV2",
    "Variable",
    "ReadVariableOp",
    "HashTableV2",
    "MutableHashTableV2",
    "LookupTableFindV2",
)


def _refuse_state(graph: TensorGraph, signature: ServedSignature) -> None:
    needed = graph.pruned(
        [port.tensor for port in signature.outputs], [port.tensor for port in signature.inputs]
    )
    fed = {node_of(port.tensor) for port in signature.inputs}
    for node in needed.nodes.values():
        if node.op in _STATE:
            raise ModelLoadError(
                f"node {node.name!r} ({node.op}) keeps its values outside of the graph; give the "
                f"SavedModel folder or the Keras model, or a graph whose variables were frozen"
            )
        if node.op in PLACEHOLDERS and node.name not in fed:
            kind = tf.as_dtype(node.attr["dtype"].type)
            if kind in (tf.resource, tf.variant):
                raise ModelLoadError(
                    f"the model reads {node.name!r}, a lookup table or other resource that is not "
                    f"part of its graph; export it without"
                )
            if node.op != "PlaceholderWithDefault":
                raise ModelLoadError(
                    f"the outputs need the input {node.name!r}, which is not among the inputs "
                    f"({', '.join(sorted(fed)) or 'none'})"
                )
