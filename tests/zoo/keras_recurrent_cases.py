"""Cases of Keras layers with recurrence."""

from __future__ import annotations

from functools import partial

import keras
import numpy as np
from keras import layers
from zoo.harness import Built
from zoo.keras_models import IMAGE, SAMPLES, SEQUENCE, Maker, around, built, case, made, normal

_UNITS = 8


def _lengths_free(name: str) -> Built:
    """Return a net of an RNN for sequences of any length, with batches of two lengths."""
    inputs = keras.Input((None, SEQUENCE[1]))
    states = getattr(layers, name)(_UNITS)(layers.Dense(8)(inputs))
    net = keras.Model(inputs, layers.Dense(4)(states))
    return built(net, normal(*SEQUENCE), normal(3, SEQUENCE[1]))


def _masked(name: str) -> Built:
    """Return a net of an RNN behind an embedding that masks the padding."""
    inputs = keras.Input((6,), dtype="int32")
    embedded = layers.Embedding(16, 8, mask_zero=True)(inputs)
    net = keras.Model(inputs, layers.Dense(4)(getattr(layers, name)(_UNITS)(embedded)))
    tokens = np.arange(SAMPLES * 6, dtype="i4").reshape(SAMPLES, 6) % 16
    tokens[1:, 4:] = 0
    return built(net, tokens)


def _with_states(name: str) -> Built:
    """Return a net that gives the sequence and the states of an RNN, and takes its first states."""
    inputs = keras.Input(SEQUENCE)
    kind = getattr(layers, name)
    first = layers.Dense(_UNITS)(inputs[:, 0])
    states = [first, first] if name == "LSTM" else first
    results = kind(_UNITS, return_sequences=True, return_state=True)(inputs, initial_state=states)
    named = {f"result_{index}": result for index, result in enumerate(results)}
    return built(keras.Model(inputs, named), normal(*SEQUENCE))


def _one_step(name: str) -> Built:
    """Return a net that makes a single step of a cell."""
    inputs, first = keras.Input((8,)), keras.Input((_UNITS,))
    cell = getattr(layers, name)(_UNITS)
    states = [first, first] if name == "LSTMCell" else [first]
    output, _ = cell(inputs, states)
    net = keras.Model([inputs, first], layers.Dense(4)(output))
    return built(net, [normal(8), normal(_UNITS)])


def _of_cells(kind: str) -> layers.RNN:
    """Return an RNN of two cells."""
    cells = [getattr(layers, kind)(_UNITS) for _ in range(2)]
    return layers.RNN(layers.StackedRNNCells(cells))


def _both_ways(kind: str, merge: str | None) -> layers.Bidirectional:
    """Return an RNN that reads sequences from both ends."""
    return layers.Bidirectional(getattr(layers, kind)(_UNITS), merge_mode=merge)


def _two_deep() -> keras.Sequential:
    """Return two LSTMs, one behind the other."""
    return keras.Sequential(
        [layers.LSTM(_UNITS, return_sequences=True), layers.LSTM(_UNITS, dropout=0.2)]
    )


def _over_time(shape: tuple[int, ...], part: Maker) -> Built:
    """Return a net that runs a layer on every step of a sequence."""
    inputs = keras.Input(shape)
    outputs = layers.Flatten()(layers.TimeDistributed(part())(inputs))
    return built(keras.Model(inputs, layers.Dense(4)(outputs)), normal(*shape))


def _over_images(axes: int, sequences: bool) -> Built:
    """Return a net with a convolutional LSTM."""
    shape = _CONVOLUTIONAL[axes]
    kind = getattr(layers, f"ConvLSTM{axes}D")
    inputs = keras.Input(shape)
    states = kind(4, 3, padding="same", return_sequences=sequences)(inputs)
    outputs = layers.Dense(4)(layers.Flatten()(states))
    return built(keras.Model(inputs, outputs), normal(*shape))


_RNNS = ("LSTM", "GRU", "SimpleRNN")

_CONVOLUTIONAL = {1: (4, 8, 3), 2: (3, 6, 6, 3), 3: (2, 4, 4, 4, 2)}

CASES = [
    *(case(name, around, SEQUENCE, units=_UNITS) for name in _RNNS),
    *(
        case(f"{name} {label}", around, SEQUENCE, units=_UNITS, **settings)
        for name in _RNNS
        for label, settings in (
            ("of sequences", {"return_sequences": True}),
            ("backwards", {"go_backwards": True}),
        )
    ),
    *(case(f"{name} unrolled", around, (3, 8), units=_UNITS, unroll=True) for name in _RNNS),
    *(made(f"{name} of free length", _lengths_free, name) for name in _RNNS),
    *(made(f"{name} with masks", _masked, name) for name in _RNNS),
    *(made(f"{name} with states", _with_states, name) for name in _RNNS),
    *(made(f"{name}Cell", _one_step, f"{name}Cell") for name in _RNNS),
    case("GRU reset before", around, SEQUENCE, units=_UNITS, reset_after=False),
    *(
        made(f"Bidirectional {name}", around, partial(_both_ways, name, merge), SEQUENCE)
        for name, merge in (("LSTM", "concat"), ("GRU", "sum"), ("SimpleRNN", None))
    ),
    *(
        made(f"ConvLSTM{axes}D", _over_images, axes, sequences)
        for axes, sequences in ((1, False), (2, False), (3, False))
    ),
    made("ConvLSTM2D of sequences", _over_images, 2, True),
    made("RNN of a cell", around, lambda: layers.RNN(layers.GRUCell(_UNITS)), SEQUENCE),
    *(
        made(f"StackedRNNCells of {name}", around, partial(_of_cells, name), SEQUENCE)
        for name in ("LSTMCell", "GRUCell")
    ),
    made("TimeDistributed of Dense", _over_time, SEQUENCE, lambda: layers.Dense(8)),
    made("TimeDistributed of Conv2D", _over_time, (3, *IMAGE), lambda: layers.Conv2D(4, 3)),
    made("LSTM twice", around, _two_deep, SEQUENCE),
]
