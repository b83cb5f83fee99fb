"""Graphs with results that nobody reads, for which LiteRT allocates no memory."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers, ops
from litert_files import find_contradiction
from litert_nets import as_litert, fix_batch, run_litert

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.core.precision import Precision
from neural_mp.space import list_effective_ops
from neural_mp.testing import machine, signal_to_noise, uniform

ADAPTOR = LiteRtAdaptor()
STEPS = np.random.default_rng(0).normal(size=(4, 6, 8)).astype(np.float32)


def make_recurrent(unroll):
    """A net around an LSTM, whose loop has results that nobody reads; so have steps of an RNN."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(STEPS.shape[1:])
    states = layers.LSTM(8, unroll=unroll)(layers.Dense(8)(inputs))
    return as_litert(fix_batch(keras.Model(inputs, layers.Dense(4)(states)), len(STEPS)))


def make_split(part):
    """A net of which a single part of a split is read."""
    keras.utils.set_random_seed(0)
    inputs = keras.Input(STEPS.shape[1:])
    parts = ops.split(layers.Conv1D(8, 3)(inputs), 2, axis=-1)
    return as_litert(keras.Model(inputs, layers.Conv1D(4, 3)(parts[part])))


NETS = {
    "loop": lambda: make_recurrent(unroll=False),
    "unrolled": lambda: make_recurrent(unroll=True),
    "first part": lambda: make_split(0),
    "last part": lambda: make_split(1),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_all_layers_run_in_int8(name, capfd):
    content = NETS[name]()
    model = ADAPTOR.load(content, example=STEPS)
    capfd.readouterr()
    space = ADAPTOR.space(model, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    converted = ADAPTOR.convert(model, plan, ADAPTOR.observe(model, [STEPS], space), space)
    assert "Applying" not in capfd.readouterr().err  # a bar of the quantizer
    layers_in_int8 = [
        op.name
        for op in space.graph
        if op.type in ("FULLY_CONNECTED", "CONV_2D") and plan.effective[op.name] is Precision.INT8
    ]
    assert len(layers_in_int8) == sum(
        op.type in ("FULLY_CONNECTED", "CONV_2D") for op in space.graph
    )
    result = ADAPTOR.native(converted)
    assert not find_contradiction(list_effective_ops(space, plan), ADAPTOR.native(model), result)
    (expected,), (output,) = run_litert(content, STEPS), run_litert(result, STEPS)
    assert signal_to_noise(expected, output) > 25
    np.testing.assert_array_equal(ADAPTOR.predict(converted, STEPS), output)


def test_the_first_nan_behind_a_split_is_located():
    inputs = keras.Input((4,))
    first, second = ops.split(inputs, 2, axis=-1)
    outputs = layers.Concatenate()([first * 2.0, ops.log(second)])
    model = ADAPTOR.load(as_litert(keras.Model(inputs, outputs)))
    name = ADAPTOR.op_outputs.first_non_finite(model, np.float32([[1, 2, 3, -4]]))
    assert model.structure.get_type(name) == "LOG"
