"""Training on two devices, in a process of its own: the devices are set before the first run.

Each case prints its name at its end.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from sklearn.datasets import load_digits

from neural_mp.adaptors.tensorflow.training.loss_scale_optimizer import V1LossScaleOptimizer
from neural_mp.errors import ConfigurationError, TrainingError
from neural_mp.training import LossScale, LossScaleOptimizer, Watch, advise


def a_loss_scale_skips_steps(strategy, images, labels):
    with strategy.scope():
        keras.utils.set_random_seed(0)
        net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(16, activation="relu")])
        net.add(keras.layers.Dense(10))
        optimizer = LossScaleOptimizer(keras.optimizers.Adam(0.01), LossScale(growth_interval=20))
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        net.compile(optimizer, loss, metrics=["accuracy"], jit_compile=False)
    weights = net.get_weights()
    for skipped, row in enumerate((0, 40), 1):  # of the first device, and of the second
        spoiled = images[:64].copy()
        spoiled[row] = np.inf
        net.fit(spoiled, labels[:64], batch_size=64, shuffle=False, verbose=0)
        assert all(map(np.array_equal, weights, net.get_weights()))
        assert (optimizer.skipped_steps, optimizer.iterations.numpy()) == (skipped, 0)
        assert optimizer.loss_scale == 2**15 / 2**skipped
    history = net.fit(images, labels, batch_size=64, epochs=3, verbose=0).history
    assert history["accuracy"][-1] > 0.9
    assert optimizer.skipped_in_a_row == 0
    assert optimizer.loss_scale > 2**16


def a_training_is_watched_and_advice_refused(strategy, images, labels):
    images, labels = images[:256], labels[:256]
    with strategy.scope():
        net = keras.Sequential([keras.Input((64,)), keras.layers.Dense(10, activation="softmax")])
    for around in (LossScaleOptimizer, keras.optimizers.LossScaleOptimizer):
        with strategy.scope():
            net.compile(around(keras.optimizers.SGD()), "sparse_categorical_crossentropy")
        with pytest.raises(TrainingError, match="The batch contains NaN"):
            net.fit(images * np.nan, labels, verbose=0, callbacks=[Watch(patience=3)])
    with pytest.raises(ConfigurationError, match="on several devices"):
        advise(net, [(images, labels)])


def a_loss_scale_of_tensorflow_1_skips_steps(strategy, images, labels):
    with strategy.scope():
        weight = tf.Variable([1.0, 2.0])
        optimizer = V1LossScaleOptimizer(
            tf.compat.v1.train.GradientDescentOptimizer(0.1), LossScale(initial=8.0)
        )

    def step(factor):
        optimizer.minimize(lambda: factor * tf.reduce_sum(tf.square(weight)), var_list=[weight])

    @tf.function
    def run(factors):
        strategy.run(step, args=(factors,))

    def factors(first, second):
        return strategy.experimental_distribute_values_from_function(
            lambda replica: tf.constant((first, second)[replica.replica_id_in_sync_group])
        )

    for skipped, spoiled in enumerate(((np.inf, 1.0), (1.0, np.inf)), 1):
        run(factors(*spoiled))
        assert weight.numpy().tolist() == [1.0, 2.0]
        assert float(optimizer.loss_scale) == 8 / 2**skipped
        assert int(optimizer.skipped_steps) == skipped
    run(factors(1.0, 1.0))
    assert (weight.numpy() < [1.0, 2.0]).all()
    assert int(optimizer.skipped_in_a_row) == 0


CASES = (
    a_loss_scale_skips_steps,
    a_training_is_watched_and_advice_refused,
    a_loss_scale_of_tensorflow_1_skips_steps,
)


def main():
    halves = [tf.config.LogicalDeviceConfiguration()] * 2
    tf.config.set_logical_device_configuration(tf.config.list_physical_devices("CPU")[0], halves)
    strategy = tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"])
    digits = load_digits()
    for case in CASES:
        case(strategy, (digits.data / 16).astype(np.float32), digits.target)
        print(case.__name__, flush=True)


if __name__ == "__main__":
    main()
