"""Results of ops in graphs with results of free sizes."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from litert_nets import as_litert

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.adaptors.litert.observe import observe_values


@pytest.mark.slow
def test_observed_values_are_those_of_every_sample():
    keras.utils.set_random_seed(0)
    inputs = keras.Input((8,))
    repeated = layers.Flatten()(layers.RepeatVector(3)(layers.Dense(8)(inputs)))
    rows = np.random.default_rng(0).normal(size=(6, 8)).astype(np.float32)
    model = LiteRtAdaptor().load(as_litert(keras.Model(inputs, layers.Dense(4)(repeated))))
    structure = model.structure
    dense = next(op for op in structure.ops if structure.get_type(op) == "FULLY_CONNECTED")
    batches = np.split(rows, 3)
    for _ in range(5):
        values = np.concatenate([v for _, v in observe_values(model, batches, [dense])])
        np.testing.assert_allclose(values, rows @ structure.get_weight(dense).T, atol=1e-5)
