"""`neural_mp.calibration` of Keras models: the inputs of calls that the user's own loop makes."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import neural_mp
from neural_mp import MixedPrecision
from neural_mp.errors import ConversionError, DataError


@pytest.fixture
def net():
    tf.keras.utils.set_random_seed(0)
    layers = tf.keras.layers
    return tf.keras.Sequential(
        [layers.Input((32,)), layers.Dense(64, activation="relu"), layers.Dense(8)]
    )


@pytest.fixture
def data() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((24, 32)).astype(np.float32)


def test_direct_calls_and_the_batches_of_predict_are_recorded(net, data):
    expected = net.predict(data, verbose=0)
    compiled = net.predict_function
    with neural_mp.calibration(net) as calibrated:
        net(data[:8])
        outputs = net.predict(data[8:], batch_size=8, verbose=0)
    np.testing.assert_array_equal(np.concatenate([*calibrated]), data)
    assert [len(batch) for batch in calibrated] == [8, 8, 8]
    np.testing.assert_allclose(outputs, expected[8:], atol=1e-5)
    net(data)
    assert len(calibrated) == 3
    assert net.predict_function is compiled
    assert not net.run_eagerly


def test_several_inputs_are_recorded_as_the_model_takes_them(data):
    left, right = tf.keras.Input((32,), name="left"), tf.keras.Input((32,), name="right")
    outputs = tf.keras.layers.Dense(4)(left + right)
    with neural_mp.calibration(model := tf.keras.Model([left, right], outputs)) as calibrated:
        model([data, 2 * data])
    (pair,) = calibrated
    np.testing.assert_array_equal(pair[1], 2 * data)
    named = tf.keras.Model({"left": left, "right": right}, outputs)
    with neural_mp.calibration(named) as calibrated:
        named({"left": data, "right": 3 * data})
    (by_name,) = calibrated
    np.testing.assert_array_equal(by_name["right"], 3 * data)


def test_ranges_of_the_recorded_calls_are_those_of_the_same_batches(net, data):
    batches = [data[:8], data[8:16], data[16:]]
    with neural_mp.calibration(net) as calibrated:
        for batch in batches:
            net(batch)
    ranges = []
    for dataloader in (calibrated, batches):
        converter = MixedPrecision(
            model=net, precisions="int8", calib_dataloader=dataloader, approach="static"
        )
        converter.exit_policy = {"performance_only": True}
        ranges.append(converter().observations.ranges)
    assert ranges[0] == ranges[1]


def test_symbols_are_not_data(net, data):
    with neural_mp.calibration(net) as calibrated:
        tf.function(net)(data)
    with pytest.raises(DataError, match="no call of the model was recorded"):
        next(iter(calibrated))


def test_other_objects_of_tensorflow_name_the_way():
    function = tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([8, 32]))
    with (
        pytest.raises(ConversionError, match="calib_dataloader"),
        neural_mp.calibration(function),
    ):
        pass
