"""Keras nets as the bytes of `.tflite` files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf
from ai_edge_litert.interpreter import Interpreter


def as_litert(net: keras.Model) -> bytes:
    """Return the flatbuffer of a net, with a free batch size."""
    return bytes(tf.lite.TFLiteConverter.from_keras_model(net).convert())


def run_litert(content: bytes, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return the outputs of a plain interpreter, without this package."""
    interpreter = Interpreter(model_content=content, num_threads=1)
    ports: Sequence[dict[str, int]] = interpreter.get_input_details()
    for port, value in zip(ports, inputs, strict=True):
        interpreter.resize_tensor_input(port["index"], value.shape)
    interpreter.allocate_tensors()
    for port, value in zip(ports, inputs, strict=True):
        interpreter.set_tensor(port["index"], value)
    interpreter.invoke()
    return [interpreter.get_tensor(port["index"]) for port in interpreter.get_output_details()]


def fix_batch(net: keras.Model, samples: int) -> keras.Model:
    """Return a net for one batch size: the converter reads loops of no other nets."""
    inputs = keras.tree.map_structure(
        lambda port: keras.Input(
            batch_shape=(samples, *port.shape[1:]), dtype=port.dtype, name=port.name
        ),
        net.input,
    )
    return keras.Model(inputs, net(inputs))


def run_signature(content: bytes, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Return output → array of a plain interpreter, by the names of the signature."""
    runner = Interpreter(model_content=content, num_threads=1).get_signature_runner()
    return dict(runner(**feeds))
