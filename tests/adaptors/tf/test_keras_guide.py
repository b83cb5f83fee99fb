"""Keras's guide "Mixed precision", as people have it, on digits, with `LossScaleOptimizer` of here.

What the guide says otherwise: dtypes of Keras 3 are strings, and the data are digits.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, mixed_precision

from neural_mp.training import LossScaleOptimizer, set_policy


@pytest.fixture(autouse=True)
def _float32_again(monkeypatch):
    monkeypatch.setenv("FORCE_FP16", "1")
    monkeypatch.setenv("FORCE_BF16", "1")
    yield
    set_policy("float32")


@pytest.fixture
def data(digits):
    (x_train, y_train), (x_test, y_test) = (
        (split.images.reshape(-1, 64).astype("float32"), split.labels) for split in digits
    )
    return x_train, y_train, x_test, y_test


def the_guides_model():
    inputs = keras.Input(shape=(64,), name="digits")
    dense1 = layers.Dense(64, activation="relu", name="dense_1")
    x = dense1(inputs)
    dense2 = layers.Dense(64, activation="relu", name="dense_2")
    x = dense2(x)
    assert dense1.dtype_policy.compute_dtype == mixed_precision.global_policy().compute_dtype
    assert x.dtype == mixed_precision.global_policy().compute_dtype
    assert dense1.kernel.dtype == "float32"
    x = layers.Dense(10, name="dense_logits")(x)
    outputs = layers.Activation("softmax", dtype="float32", name="predictions")(x)
    assert outputs.dtype == "float32"
    return keras.Model(inputs=inputs, outputs=outputs)


def set_by_keras(name):
    policy = mixed_precision.Policy(name)
    mixed_precision.set_global_policy(policy)


@pytest.mark.slow
@pytest.mark.parametrize("choose", [set_by_keras, set_policy])
@pytest.mark.parametrize("name", ["mixed_float16", "mixed_bfloat16"])
def test_training_with_fit(choose, name, data):
    x_train, y_train, x_test, y_test = data
    choose(name)
    model = the_guides_model()
    optimizer = keras.optimizers.RMSprop()
    if name == "mixed_float16":
        optimizer = LossScaleOptimizer(optimizer)
    model.compile(
        loss="sparse_categorical_crossentropy",
        optimizer=optimizer,
        metrics=["accuracy"],
        jit_compile=False,
    )
    initial_weights = model.get_weights()
    history = model.fit(x_train, y_train, batch_size=64, epochs=5, validation_split=0.2, verbose=0)
    assert history.history["val_loss"][-1] < history.history["val_loss"][0]
    assert model.evaluate(x_test, y_test, verbose=0)[1] > 0.85
    assert model.optimizer is optimizer
    assert all(weight.dtype == np.float32 for weight in initial_weights)


@pytest.mark.slow
def test_training_with_a_custom_loop(data):
    x_train, y_train, x_test, y_test = data
    set_policy("mixed_float16")
    model = the_guides_model()
    initial_weights = model.get_weights()
    optimizer = keras.optimizers.RMSprop()
    optimizer = LossScaleOptimizer(optimizer)
    loss_object = keras.losses.SparseCategoricalCrossentropy()
    train_dataset = (
        tf.data.Dataset.from_tensor_slices((x_train, y_train)).shuffle(10000, seed=0).batch(64)
    )
    test_dataset = tf.data.Dataset.from_tensor_slices((x_test, y_test)).batch(64)

    @tf.function
    def train_step(x, y):
        with tf.GradientTape() as tape:
            predictions = model(x)
            loss = loss_object(y, predictions)
            scaled_loss = optimizer.get_scaled_loss(loss)
        scaled_gradients = tape.gradient(scaled_loss, model.trainable_variables)
        gradients = optimizer.get_unscaled_gradients(scaled_gradients)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    @tf.function
    def test_step(x):
        return model(x, training=False)

    model.set_weights(initial_weights)
    test_accuracy = keras.metrics.SparseCategoricalAccuracy(name="test_accuracy")
    accuracies = []
    for _ in range(5):
        epoch_loss_avg = keras.metrics.Mean()
        for x, y in train_dataset:
            epoch_loss_avg(train_step(x, y))
        test_accuracy.reset_state()
        for x, y in test_dataset:
            test_accuracy.update_state(y, test_step(x))
        accuracies.append(float(test_accuracy.result()))
    assert accuracies[-1] > 0.85
    assert accuracies[-1] > accuracies[0]
    assert optimizer.loss_scale > 0
    steps = 5 * len(train_dataset)
    assert int(optimizer.iterations) + optimizer.skipped_steps == steps
