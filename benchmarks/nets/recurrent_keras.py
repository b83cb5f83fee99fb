"""Recurrent layers of Keras, and the two ways to run them in FP32."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf
from keras import layers

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.adaptors.tensorflow.capture.freeze import freeze_concrete_function
from neural_mp.adaptors.tensorflow.graph.runtime import Runner, import_graph

STEPS, WIDTH, HIDDEN = 32, 64, 256


def _of(layer: Callable[[], Any]) -> Callable[[], keras.Model]:
    def make() -> keras.Model:
        inputs = keras.Input((STEPS, WIDTH))
        return keras.Model(inputs, layer()(inputs))

    return make


#: Name → makes the model.
MODELS: dict[str, Callable[[], keras.Model]] = {
    "lstm": _of(lambda: layers.LSTM(HIDDEN)),
    "gru": _of(lambda: layers.GRU(HIDDEN)),
    "bidirectional lstm": _of(lambda: layers.Bidirectional(layers.LSTM(HIDDEN))),
    "bidirectional gru": _of(lambda: layers.Bidirectional(layers.GRU(HIDDEN))),
    "seq2seq gru": _of(lambda: _encoder_and_decoder),
}


def _encoder_and_decoder(inputs: Any) -> Any:
    states = layers.GRU(HIDDEN)(inputs)
    return layers.GRU(HIDDEN, return_sequences=True)(inputs, initial_state=states)


def frozen(model: keras.Model) -> Callable[[Any], Any]:
    """The graph as TensorFlow freezes it, in a session."""
    spec = tf.TensorSpec((None, STEPS, WIDTH), tf.float32)
    graph, (fed,), (result,) = freeze_concrete_function(
        tf.function(model).get_concrete_function(spec)
    )
    runner = Runner(import_graph(graph.to_graph_def()))
    return lambda inputs: runner({fed.name: inputs}, [result.name])


def prepared(model: keras.Model) -> Callable[[Any], Any]:
    """The graph that conversion begins with, in a session: all that a result gains but for INT8."""
    adaptor = TensorFlowAdaptor()
    loaded = adaptor.load(model)
    return lambda inputs: adaptor.predict(loaded, inputs)
