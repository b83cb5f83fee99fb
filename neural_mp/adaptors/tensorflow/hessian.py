"""Hessian traces with respect to the weights of layers."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import numpy as np
import tensorflow as tf

from neural_mp.adaptors.common.sensitivity.hessian import Squares, summed_traces
from neural_mp.adaptors.tensorflow.model import TensorFlowModel
from neural_mp.adaptors.tensorflow.runtime import Runner
from neural_mp.adaptors.tensorflow.tensor_graph import Array, indexed, plain
from neural_mp.errors import ConversionError


def hessian_traces(
    model: TensorFlowModel, batches: Iterable[Any], ops: Collection[str]
) -> dict[str, float]:
    """Return op → trace of the Hessian with respect to its weight.

    Raises:
        ConversionError: an op of the model has no gradient.
    """
    graph, constants = model.without_weights()
    outputs = [
        tensor
        for port in model.signature.outputs
        if (tensor := graph.get_tensor_by_name(indexed(port.tensor))).dtype.is_floating
    ]
    weights = {op: plain(model.graph.nodes[op].input[1]) for op in ops}
    with graph.as_default():
        signs = [tf.compat.v1.placeholder(tensor.dtype) for tensor in outputs]
        tensors = [graph.get_tensor_by_name(indexed(name)) for name in weights.values()]
        try:
            gradients = tf.compat.v1.gradients(outputs, tensors, signs)
        except LookupError as error:
            raise ConversionError(f"an op of the model has no gradient: {error}") from error
        squares = {
            op: tf.reduce_sum(tf.square(gradient)).name
            for op, gradient in zip(weights, gradients, strict=True)
            if gradient is not None
        }
    runner = Runner(graph, constants)

    def outputs_of(inputs: Any) -> tuple[list[tuple[int, ...]], Squares]:
        feeds = model.signature.bind(inputs)

        def squared(directions: list[Array]) -> dict[str, float]:
            directed = zip(signs, directions, strict=True)
            arguments = {**feeds, **{placeholder.name: value for placeholder, value in directed}}
            return dict(
                zip(squares, map(float, runner(arguments, list(squares.values()))), strict=True)
            )

        results = runner(feeds, [tensor.name for tensor in outputs])
        return [np.shape(value) for value in results], squared

    return summed_traces(weights, map(outputs_of, batches))
