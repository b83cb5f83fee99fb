"""`ConvertedModel`: the callable module that users get unless the model is still a Keras model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.example_inputs import in_parts
from neural_mp.adaptors.common.signature import Signature
from neural_mp.adaptors.tensorflow.tensor_graph import GraphDef, TensorGraph, indexed


class ConvertedModel(tf.Module):
    """A frozen graph that can be called like its original and saved by `tf.saved_model.save`.

    Args:
        graph: the graph.
        signature: names, tensors and types of the inputs and outputs.
        keys: names of the signature in a SavedModel.

    Attributes:
        graph_def: the graph.
        signature: names, tensors and types of the inputs and outputs.
        serving_signatures: function for TensorFlow Serving, with the names of the signature; the
            argument `signatures` of `tf.saved_model.save`.
    """

    def __init__(self, graph: TensorGraph, signature: Signature, keys: Iterable[str]) -> None:
        super().__init__(name="converted")
        self.graph_def: GraphDef = graph.to_graph_def()
        self.signature = signature
        ports = signature.inputs
        specs = [tf.TensorSpec(port.shape, port.dtype, name=port.name) for port in ports]
        fetched = list(map(indexed, signature.output_tensors))

        def run(*values: tf.Tensor) -> dict[str, tf.Tensor]:
            fed = dict(zip(map(indexed, signature.input_tensors), values, strict=True))
            results = tf.graph_util.import_graph_def(
                self.graph_def, input_map=fed, return_elements=fetched, name=""
            )
            names = [port.name for port in signature.outputs]
            return dict(zip(names, results, strict=True))

        # A tf.function would tie the outputs to every op with a side effect, loops written as
        # dataflow included. A wrapped function alone cannot be saved.
        wrapped = tf.compat.v1.wrap_function(run, specs)
        self._run = tf.function(
            lambda *values: wrapped(*values), input_signature=specs, autograph=False
        )
        function = self._run.get_concrete_function()
        self.serving_signatures = dict.fromkeys(keys, function)

    @property
    def signatures(self) -> Mapping[str, Any]:
        """The functions of a loaded SavedModel by name: `signatures["serving_default"]`."""
        return self.serving_signatures

    def __call__(self, *args: object, training: bool = False, **kwargs: object) -> Any:
        """Run one batch, given by position, by name, or as one dict or list; return tensors."""
        if training:
            raise ValueError("a converted model cannot be trained; train the original model")
        inputs = kwargs or (args[0] if len(args) == 1 else list(args))
        assigned = self.signature.assigned(inputs)
        if not any(tf.is_tensor(value) for value in assigned):
            assigned = list(self.signature.bind(inputs).values())
        values = [
            tf.cast(value, port.dtype) if tf.is_tensor(value) else tf.constant(value, port.dtype)
            for value, port in zip(assigned, self.signature.inputs, strict=True)
        ]
        results = self._run(*values)
        return self.signature.packed([results[port.name] for port in self.signature.outputs])

    def predict(self, x: object, batch_size: int = 32, **_: object) -> Any:
        """Return the outputs for all of `x` as arrays, in batches, as Keras models do."""
        feeds = self.signature.bind(x)
        split = {
            port.tensor: feeds[port.tensor]
            for port in self.signature.inputs
            if feeds[port.tensor] is not port.default and np.ndim(feeds[port.tensor])
        }
        size = len(next(iter(split.values())))
        parts = [
            tf.nest.map_structure(np.asarray, self(*(feeds | part).values()))
            for part in in_parts(split, size, batch_size)
        ]
        return tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *parts)

    def predict_on_batch(self, x: object) -> Any:
        """Return the outputs for one batch as arrays, as Keras models do."""
        return tf.nest.map_structure(np.asarray, self(x))
