"""Quantization-aware training of Keras models: from the plan to the converted model."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from keras_nets import compile_briefly

import neural_mp
from neural_mp import training
from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.adaptors.tensorflow.training.simulated_model import FakeQuantizer
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, ConversionError, DataError, TrainingError
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
    compile_briefly(model, keras.optimizers.Adam(rate), LOSS)
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


def test_training_leaves_the_given_model_unchanged():
    net = convolutional()
    original = net.get_weights()
    fitted(simulation(net), 1)
    for value, expected in zip(net.get_weights(), original, strict=True):
        np.testing.assert_array_equal(value, expected)


@pytest.mark.slow
def test_scales_are_learned_or_stay():
    learned, fixed = simulation(), simulation(learn_scales=False)
    for model in (learned, fixed):
        fitted(model, 2)
    assert any(np.abs(scale.numpy()).max() > 0 for scale in learned.scales())
    assert all(np.abs(scale.numpy()).max() == 0 for scale in fixed.scales())


def test_gradients_are_those_of_lsq():
    """Esser et al., 2020, equations 3 to 5, with the chain rule for the logarithm."""
    quantizer = FakeQuantizer(QuantParams(0.1, 10), True)
    x = tf.constant([-2.0, -0.33, 0.0, 0.42, 1.17, 40.0])
    with tf.GradientTape() as tape:
        tape.watch(x)
        total = tf.reduce_sum(quantizer(x))
    by_x, by_scale = tape.gradient(total, [x, quantizer.log_scale.value])
    np.testing.assert_array_equal(by_x, [0, 1, 1, 1, 1, 0])
    steps = np.array([-10, -3 + 3.3, 0, 4 - 4.2, 12 - 11.7, 245])  # d(rounded)/d(scale)
    assert float(by_scale) == pytest.approx(0.1 * steps.sum() / np.sqrt(6 * 255), rel=1e-4)


def test_ranges_follow_the_data_until_observers_are_frozen():
    model = simulation(observe_steps=2, learn_scales=False)
    encodings = []
    for factor in (1, 2, 2, 4):
        model(IMAGES * factor, training=True)
        encodings.append([quantizer.quant_params for quantizer in model.all_quantizers])
    assert encodings[0] != encodings[1]
    assert encodings[1] == encodings[2] == encodings[3]
    assert int(model.steps) == 4
    assert distance(model, training.finish(model)) < 1e-2


def test_scales_of_weights_follow_the_weights_until_observers_are_frozen():
    model = simulation(observe_steps=1, learn_scales=False)
    kernel = model.all_kernels[0]
    kernel.weight.assign(kernel.weight * 2)
    original = np.array(kernel.initial)
    model(IMAGES, training=True)
    np.testing.assert_allclose(kernel.initial, original * 2, rtol=1e-6)
    kernel.weight.assign(kernel.weight * 2)
    model(IMAGES, training=True)
    np.testing.assert_allclose(kernel.initial, original * 2, rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["saved.keras", "saved.weights.h5"])
def test_a_file_resumes_with_scales_and_steps(tmp_path, name):
    model = simulation(observe_steps=2)
    whole = name.endswith(".keras")
    saving = keras.callbacks.ModelCheckpoint(tmp_path / name, save_weights_only=not whole)
    compile_briefly(model, "adam", LOSS)
    model.fit(IMAGES, LABELS, 16, verbose=0, callbacks=[saving])
    restored = simulation(observe_steps=2)
    restored.load_weights(tmp_path / name)
    assert int(restored.steps) == 4
    for value, expected in zip(restored.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_array_equal(value, expected)
    if whole:
        with pytest.raises(ConfigurationError, match="load_weights"):
            keras.models.load_model(tmp_path / name)


@pytest.mark.slow
def test_the_result_of_a_training_is_saved_and_loaded_and_gives_its_plan(tmp_path):
    net = convolutional()
    model = simulation(net)
    fitted(model, 1)
    result = training.finish(model)
    result.save(tmp_path / "model")
    again = neural_mp.load(tmp_path / "model")
    np.testing.assert_array_equal(again.model(IMAGES), result.model(IMAGES))
    fresh = training.quantization_aware(net, result)
    np.testing.assert_allclose(fresh(IMAGES), simulation(net)(IMAGES), rtol=1e-5, atol=1e-6)


def test_frozen_layers_stay_frozen_and_need_one_that_is_not():
    net = convolutional()
    net.get_layer("depthwise").trainable = False
    net.get_layer("norm").trainable = False  # folded into a layer that is trained
    model = simulation(net)
    fixed = [kernel.weight.shape for kernel in model.all_kernels if not kernel.weight.trainable]
    assert fixed == [(3, 3, 8, 1)]
    net.trainable = False
    with pytest.raises(ConfigurationError, match="float weights to train"):
        simulation(net)


def test_a_layer_without_gradients_is_named():
    image = keras.Input((8, 8, 1))
    x = layers.Dense(4)(layers.Flatten()(image))
    net = keras.Model(image, layers.GRU(4, name="memory")(layers.Reshape((2, 2))(x)))
    with pytest.raises(ConversionError, match="in layer 'memory'"):
        simulation(net)


def test_inputs_and_outputs_keep_their_names():
    keras.utils.set_random_seed(0)
    first, second = keras.Input((8,), name="first"), keras.Input((8,), name="second")
    x = layers.Dense(8, "relu")(layers.Concatenate()([first, second]))
    net = keras.Model([first, second], {"b": layers.Dense(2)(x), "a": layers.Dense(3)(x)})
    batch = {name: np.ones((4, 8), np.float32) for name in ("first", "second")}
    model = training.quantization_aware(net, plan_of(net), calibration=[batch])
    compile_briefly(model, "sgd", {"a": "mse", "b": "mse"})
    targets = {"a": np.zeros((4, 3)), "b": np.zeros((4, 2))}
    model.fit(batch, targets, verbose=0)
    assert {name: value.shape[1] for name, value in model(batch).items()} == {"a": 3, "b": 2}
    assert training.fit(model, [batch], epochs=1).complete


BATCHES = [(IMAGES[i : i + 16], LABELS[i : i + 16]) for i in range(0, 64, 16)]


@pytest.mark.slow
def test_interrupted_training_continues_after_its_last_epoch(tmp_path):
    whole, parts = simulation(), simulation()
    training.fit(whole, BATCHES, LOSS, epochs=3)

    class Stopping:
        """Batches of one epoch."""

        epochs = 0

        def __iter__(self):
            self.epochs += 1
            if self.epochs == 2:
                raise KeyboardInterrupt
            return iter(BATCHES)

    with pytest.raises(KeyboardInterrupt):
        training.fit(parts, Stopping(), LOSS, epochs=3, folder=tmp_path)
    again = simulation()
    assert training.fit(again, BATCHES, LOSS, epochs=3, folder=tmp_path).epochs == 3
    for value, expected in zip(again.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    (tmp_path / "epoch_3.state").write_bytes(b"damaged")
    with pytest.raises(ConfigurationError, match="checkpoint must be"):
        training.fit(simulation(), BATCHES, LOSS, epochs=4, folder=tmp_path)


def test_without_labels_outputs_approach_those_of_the_fp32_model():
    net = convolutional()
    model = simulation(net)
    progress = training.fit(model, [images for images, _ in BATCHES], epochs=6)
    assert progress.losses[-1] < 0.8 * progress.losses[0]


def test_nan_names_the_layer_and_leaves_the_best_epoch():
    model = simulation()
    best = model.get_weights()
    kernel = next(k for name, k in model.kernels.items() if "head" in name)

    class Breaking:
        """Batches whose reading breaks a weight, as a gradient of Inf would."""

        def __iter__(self):
            kernel.weight.assign(kernel.weight * np.nan)
            return iter(BATCHES)

    with pytest.raises(TrainingError, match=r"loss is nan in step 1 of epoch 1.*'head'"):
        training.fit(model, Breaking(), LOSS, epochs=2)
    for value, expected in zip(model.get_weights(), best, strict=True):
        np.testing.assert_array_equal(value, expected)


def test_misuse_is_named():
    net = convolutional()
    with pytest.raises(DataError, match="calibration"):
        training.quantization_aware(net, plan_of(net))
    with pytest.raises(DataError, match=r"\(inputs, targets\)"):
        training.fit(simulation(net), [IMAGES], LOSS)
    with pytest.raises(ConfigurationError, match="made by quantization_aware"):
        training.finish(net)
