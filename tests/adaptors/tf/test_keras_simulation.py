"""See `SimulationContract`."""

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import compile_briefly

from neural_mp.core.precision import Precision
from neural_mp.testing.training_contract import SimulatedCase, SimulationContract

INT8 = Precision.INT8
IMAGE, ROW, SEQUENCE = (6, 6, 4), (16,), (5, 8)


def _net(shape, *body):
    """Return a sequential model; each bias is random, as after training."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input(shape), *body])
    for layer in net.layers:
        if getattr(layer, "bias", None) is not None:
            layer.bias.assign(np.random.default_rng(1).normal(0, 0.1, layer.bias.shape))
    return net


def _conv(*between, **options):
    options = {"padding": "same", **options}
    return _net(IMAGE, layers.Conv2D(4, 3, **options), *between)


def _residual_sum():
    keras.utils.set_random_seed(0)
    image = keras.Input(IMAGE)
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.Add()([x, layers.Conv2D(4, 1, bias_initializer="normal")(x)])
    return keras.Model(image, layers.ReLU()(x))


def _concatenation():
    keras.utils.set_random_seed(0)
    image = keras.Input(IMAGE)
    left = layers.Conv2D(4, 1)(image)
    right = layers.Conv2D(2, 3, padding="same", activation="relu")(image)
    return keras.Model(image, layers.Conv2D(4, 1)(layers.Concatenate()([left, right])))


def _attention():
    keras.utils.set_random_seed(0)
    tokens = keras.Input(SEQUENCE)
    x = layers.MultiHeadAttention(2, 4)(tokens, tokens)
    return keras.Model(tokens, layers.Dense(8)(layers.LayerNormalization()(tokens + x)))


def _last():
    return layers.Conv2D(4, 1)


NETS = {
    "convolution": lambda: _conv(layers.ReLU(), _last()),
    "valid convolution": lambda: _conv(padding="valid"),
    "strided convolution": lambda: _conv(_last(), strides=2),
    "depthwise convolution": lambda: _net(
        IMAGE, layers.DepthwiseConv2D(3, padding="same"), layers.ReLU(6), _last()
    ),
    "separable convolution": lambda: _net(IMAGE, layers.SeparableConv2D(4, 3)),
    "batch norm": lambda: _conv(layers.BatchNormalization(), layers.ReLU(), _last()),
    "dense": lambda: _net(ROW, layers.Dense(16, "relu"), layers.Dense(4)),
    "gelu": lambda: _net(ROW, layers.Dense(16, "gelu"), layers.Dense(4)),
    "sigmoid": lambda: _net(ROW, layers.Dense(16, "sigmoid"), layers.Dense(4)),
    "silu": lambda: _conv(layers.Activation("silu"), _last()),
    "residual sum": _residual_sum,
    "concatenation": _concatenation,
    "max pooling": lambda: _conv(layers.ReLU(), layers.MaxPooling2D(), _last()),
    "average pooling": lambda: _conv(layers.ReLU(), layers.AveragePooling2D(2), _last()),
    "global pooling": lambda: _conv(layers.GlobalAveragePooling2D(), layers.Dense(4)),
    "padding": lambda: _net(IMAGE, layers.ZeroPadding2D(((0, 1), (0, 1))), _last()),
    "layer norm": lambda: _net(
        SEQUENCE, layers.Dense(8), layers.LayerNormalization(), layers.Dense(8)
    ),
    "attention": _attention,
    "dense in bf16": lambda: _net(ROW, layers.Dense(16, "relu"), layers.Dense(4)),
    "convolution in bf16": lambda: _conv(layers.ReLU(), _last()),
}
#: Integer kernels of convolutions write the scale of the calibration, whose steps may be larger
#: than 1/127 of the largest output of a batch, most of all after training towards smaller outputs.
STEPS = 1.5
#: Cases without a limit of the fraction of outputs that differ: products in bfloat16 are summed in
#: another order.
ROUNDING = {name: 1.0 for name in NETS if name.endswith("bf16")}


@pytest.mark.parametrize("layer", NETS)
class TestKerasSimulation(SimulationContract):
    """See `SimulationContract`."""

    @pytest.fixture(scope="class")
    @classmethod
    def cases(cls):
        """Return a net for each type of layer, with a thousand rows of random inputs in all."""
        random = np.random.default_rng(0)
        simulated = {}
        for name, build in NETS.items():
            net = build()
            inputs = [
                random.normal(size=(rows, *net.input_shape[1:])).astype(np.float32)
                for rows in (200, 800)
            ]
            precision = Precision.BF16 if name.endswith("bf16") else INT8
            simulated[name] = SimulatedCase(net, inputs, precision, STEPS, ROUNDING.get(name, 0.01))
        return simulated

    def outputs(self, simulated, inputs):
        return np.asarray(simulated(inputs))

    def train(self, simulated, batches):
        compile_briefly(simulated, keras.optimizers.Adam(1e-2), "mse")
        for inputs in batches:
            targets = np.zeros(simulated(inputs).shape, np.float32)
            simulated.fit(inputs, targets, len(inputs), epochs=3, verbose=0)
