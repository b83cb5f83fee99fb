"""No plan reaches the kernel that overwrites what others still read: it would end the process.

The residual sum works in place. These nets give its summand more readers, in every way a graph can;
each runs in several threads, many times, in a process of its own.
"""

import os
import re
import subprocess
import sys

import numpy as np
import pytest
import tensorflow as tf
from keras import Input, Model, layers
from machine import machine

from neural_mp.adaptors.tensorflow.adaptor import TensorFlowAdaptor
from neural_mp.core.precision import Precision
from neural_mp.testing import signal_to_noise, uniform

pytestmark = pytest.mark.slow

INT8 = Precision.INT8

MACHINE = machine()


def conv(x, channels=8, kernel=3):
    return layers.Conv2D(channels, kernel, padding="same")(x)


def relu(x):
    return layers.ReLU()(x)


def stem():
    inputs = Input((12, 12, 8))
    return inputs, relu(conv(inputs))


def read_later():
    """The summand is read again behind the sum."""
    inputs, x = stem()
    y = relu(conv(x) + x)
    return Model(inputs, relu(conv(y) + x))


def summed_by_many():
    """One tensor is the summand of parallel convolutions."""
    inputs, x = stem()
    parts = [relu(conv(x) + x) for _ in range(6)]
    return Model(inputs, layers.Concatenate()(parts))


def an_output():
    """The summand leaves the graph."""
    inputs, x = stem()
    return Model(inputs, [x, relu(conv(x) + x)])


def without_activation():
    """Sums of signed numbers, as in MobileNetV2."""
    inputs, x = stem()
    x = conv(x, 4, 1)
    for _ in range(3):
        x = layers.Add()([x, conv(relu(conv(x, 16, 1)), 4, 1)])
    return Model(inputs, conv(x))


def through_views():
    """Other readers see the summand's memory through reshapes and slices."""
    inputs, x = stem()
    y = relu(conv(x) + x)
    flat = layers.Flatten()(x)
    cropped = layers.Cropping2D(((0, 6), (0, 6)))(x)
    return Model(inputs, [y, layers.Dense(3)(flat), conv(cropped)])


def pooled_and_padded():
    """Other readers pool, pad and join it, all in integers."""
    inputs, x = stem()
    y = relu(conv(x) + x)
    pooled = layers.MaxPooling2D(1)(x)
    padded = layers.ZeroPadding2D(2)(x)
    joined = layers.Concatenate()([x, y])
    return Model(inputs, [conv(pooled), conv(padded), conv(joined), y])


def two_of_a_kind():
    """A layer is used twice on one input, which the runtime computes once."""
    inputs, x = stem()
    shared = layers.Conv2D(8, 3, padding="same")
    first, second = shared(x), shared(x)
    return Model(inputs, [relu(conv(x) + first), relu(conv(x) + second), conv(first)])


def twice_itself():
    """A convolution is added to its own input, and to its own result."""
    inputs, x = stem()
    y = conv(x)
    return Model(inputs, [relu(y + y), relu(conv(x) + x), x])


NETS = {
    build.__name__: build
    for build in (
        read_later,
        summed_by_many,
        an_output,
        without_activation,
        through_views,
        pooled_and_padded,
        two_of_a_kind,
        twice_itself,
    )
}


def run(name: str) -> None:
    """Convert a net, and let four threads use it, by us and by TensorFlow itself."""
    from concurrent.futures import ThreadPoolExecutor

    import keras

    keras.utils.set_random_seed(0)
    net = NETS[name]()
    data = np.random.default_rng(0).standard_normal((4, 12, 12, 8)).astype(np.float32)
    adaptor = TensorFlowAdaptor()
    model = adaptor.load(net)
    space = adaptor.space(model, MACHINE)
    plan = uniform(space, INT8)
    converted = adaptor.convert(
        model, space.resolve(plan), adaptor.observe(model, [data], space), space
    )
    native = adaptor.native(converted)

    def many_times(use) -> list[np.ndarray]:
        for _ in range(60):
            result = tf.nest.flatten(use(data))
        return [np.asarray(part) for part in result]

    uses = [lambda x: adaptor.predict(converted, x), native] * 2
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(many_times, uses))
    expected = [np.asarray(part) for part in tf.nest.flatten(net(data, training=False))]
    for results in outputs:
        for reference, result in zip(expected, results, strict=True):
            assert signal_to_noise(reference, result) > 25
    sums = [n for n in converted.graph.nodes.values() if b"Sum" in n.attr["fused_ops"].list.s]
    print(f"sums of {name}: {len(sums)}", flush=True)


def test_a_summand_with_other_readers():
    code = "import test_tensorflow_stress as t; [t.run(name) for name in t.NETS]"
    paths = {"PYTHONPATH": ":".join([os.environ["PYTHONPATH"], *filter(None, sys.path)])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        env={**os.environ, **paths},
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    sums = re.findall(r"sums of (\w+): (\d+)", done.stdout)
    assert [name for name, _ in sums] == list(NETS)
    assert all(count != "0" for _, count in sums)
