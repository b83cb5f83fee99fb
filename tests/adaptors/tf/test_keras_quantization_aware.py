"""Quantization-aware training of Keras models: from the plan to the converted model."""

import keras
import numpy as np
from keras import layers

from neural_mp import training
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.precision import Precision
from neural_mp.testing import digits, machine, uniform

TRAIN, TEST = digits()
IMAGES, LABELS = TRAIN.images[:64].transpose(0, 2, 3, 1), TRAIN.labels[:64]
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def convolutional():
    """Convolutions with batch norms, a residual sum, pooling and a dense layer."""
    keras.utils.set_random_seed(0)
    image = keras.Input((8, 8, 1))
    x = layers.Conv2D(8, 3, padding="same", use_bias=False, name="first")(image)
    x = layers.ReLU()(layers.BatchNormalization(name="norm")(x))
    y = layers.DepthwiseConv2D(3, padding="same", name="depthwise")(x)
    y = layers.Conv2D(8, 1, name="second", bias_initializer="normal")(y)
    x = layers.MaxPooling2D()(layers.ReLU()(layers.Add()([x, y])))
    head = layers.Dense(10, name="head", bias_initializer="normal")
    return keras.Model(image, head(layers.Flatten()(x)))


def plan_of(net, precision=Precision.INT8):
    adaptor = adaptor_for(net)
    return uniform(adaptor.space(adaptor.load(net), machine()), precision)


def simulation(net=None, **options):
    net = net or convolutional()
    options = {"calibration": [IMAGES], **options}
    return training.quantization_aware(net, plan_of(net), **options)


def fitted(model, epochs=4, rate=1e-3):
    """Train by `fit`, and return the losses."""
    model.compile(keras.optimizers.Adam(rate), LOSS)
    return model.fit(IMAGES, LABELS, 16, epochs, verbose=0, shuffle=False).history["loss"]


def distance(model, result, inputs=IMAGES):
    """Return the largest difference of outputs, relative to the largest output."""
    expected = np.asarray(model(inputs))
    return float(np.abs(expected - np.asarray(result.model(inputs))).max() / abs(expected).max())


def test_the_trained_simulation_and_the_converted_model_agree():
    model = simulation()
    assert distance(model, training.finish(model)) < 1e-2
    losses = fitted(model, 8, 5e-3)
    assert losses[-1] < 0.7 * losses[0]
    result = training.finish(model)
    assert distance(model, result) < 1e-2
    assert result.audit().holds
    images = TEST.images.transpose(0, 2, 3, 1)
    right = [
        float(np.mean(np.asarray(run(images)).argmax(1) == TEST.labels))
        for run in (model, result.model)
    ]
    assert abs(right[0] - right[1]) <= 0.002
