"""TensorFlow models compared op by op."""

import keras
import numpy as np
import pytest
from keras_nets import ChannelsLast

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.testing import ComparisonContract


def convolutions(net: keras.Model) -> list[keras.layers.Conv2D]:
    return [layer for layer in net.layers if isinstance(layer, keras.layers.Conv2D)]


@pytest.mark.slow
class TestTensorFlow(ChannelsLast, ComparisonContract):
    framework = "tensorflow"
    convolution = "Conv2D"

    @pytest.fixture(scope="class")
    @classmethod
    def source(cls, deep):
        return deep

    @pytest.fixture(scope="class")
    @classmethod
    def planted(cls, source, images):
        def load(factor: float):
            layer = convolutions(source)[5]
            weights = layer.get_weights()
            layer.set_weights([weight * factor for weight in weights])
            try:
                return TensorFlowAdaptor().load(source, example=images)
            finally:
                layer.set_weights(weights)

        return load

    @staticmethod
    def own(source, images):
        layer = convolutions(source)[5]
        inputs = keras.Model(source.inputs, layer.input)(images, training=False)
        weight, bias = layer.get_weights()
        padding = layer.padding.upper()
        outputs = keras.ops.conv(inputs, weight, padding=padding.lower())
        return np.asarray(outputs) + bias

    @staticmethod
    def first_layer(source):
        weight, bias = convolutions(source)[0].get_weights()
        return weight.transpose(3, 2, 0, 1), bias

    @staticmethod
    def channels_first(images):
        return images.transpose(0, 3, 1, 2)
