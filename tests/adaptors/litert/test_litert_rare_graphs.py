"""Graphs with ops that have no results, and with constants that have no elements."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from litert_nets import as_litert, run_litert

from neural_mp.adaptors.litert.adaptor import LiteRtAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import machine, signal_to_noise, uniform

ADAPTOR = LiteRtAdaptor()
DRAWN = np.random.default_rng(0)


def make_augmented():
    """A net that counts its calls in a variable, which it writes and never reads for an output."""
    inputs = keras.Input((8, 8, 3))
    return keras.Model(inputs, layers.Conv2D(4, 3)(layers.RandomGrayscale()(inputs)))


def make_spectrogram():
    """A net whose frames are cut by a shape without elements."""
    inputs = keras.Input((256,))
    spectrum = layers.MelSpectrogram(fft_length=32, num_mel_bins=8, sampling_rate=1000)(inputs)
    return keras.Model(inputs, layers.Dense(4)(layers.Flatten()(spectrum)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "shape"), [(make_augmented, (4, 8, 8, 3)), (make_spectrogram, (4, 256))]
)
def test_layers_run_in_int8(make, shape):
    keras.utils.set_random_seed(0)
    content, batch = as_litert(make()), DRAWN.normal(size=shape).astype(np.float32)
    model = ADAPTOR.load(content, example=batch)
    space = ADAPTOR.space(model, machine())
    plan = space.resolve(uniform(space, Precision.INT8))
    assert plan.has_low_precision
    converted = ADAPTOR.convert(model, plan, ADAPTOR.observe(model, [batch], space), space)
    (expected,) = run_litert(content, batch)
    assert signal_to_noise(expected, ADAPTOR.predict(converted, batch)) > 20
