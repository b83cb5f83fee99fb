"""Training of Keras simulations that cannot go on, or has nothing to train."""

from dataclasses import replace

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras_nets import compile_briefly
from test_keras_quantization_aware import (
    BATCHES,
    IMAGES,
    LOSS,
    convolutional,
    distance,
    plan_of,
    simulation,
)

from neural_mp import training
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.errors import ConfigurationError, TrainingError
from neural_mp.testing import machine, uniform


class Breaking:
    """Batches whose reading sets the first number of a variable."""

    def __init__(self, variable, value):
        self.variable, self.value = variable, value

    def __iter__(self):
        broken = np.array(self.variable)
        broken.flat[0] = self.value
        self.variable.assign(broken)
        return iter(BATCHES)


def kernel_of(model, layer):
    return next(k.weight for name, k in model.kernels.items() if f"/{layer}_" in name)


@pytest.mark.slow
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("layer", ["first", "depthwise", "second", "head"])
def test_nan_in_an_inner_layer_is_an_error_though_relu_hides_it(layer, value):
    model = simulation()
    best = model.get_weights()
    broken = Breaking(kernel_of(model, layer), value)
    with pytest.raises(TrainingError, match=f"in step 1 of epoch 1.*weight of layer '{layer}'"):
        training.fit(model, broken, LOSS, epochs=2)
    for expected, actual in zip(best, model.get_weights(), strict=True):
        np.testing.assert_array_equal(expected, actual)


@pytest.mark.slow
def test_a_scale_that_is_nan_is_an_error():
    model = simulation()
    key = next(name for name in model.quantizers if "depthwise" in name)
    broken = Breaking(model.quantizers[key].log_scale, np.nan)
    with pytest.raises(TrainingError, match="result of layer 'second'"):
        training.fit(model, broken, LOSS, epochs=1)


def test_a_gradient_that_is_nan_changes_no_weight():
    @tf.custom_gradient
    def broken(x):
        return x, lambda grad: grad * np.nan

    model = simulation()
    best = model.get_weights()
    with pytest.raises(TrainingError, match="the first NaN or Inf is the loss or a gradient"):
        training.fit(model, BATCHES, lambda y, outputs: LOSS(y, broken(outputs)), epochs=1)
    for expected, actual in zip(best, model.get_weights(), strict=True):
        np.testing.assert_array_equal(expected, actual)


def test_nan_in_the_inputs_is_named():
    with pytest.raises(TrainingError, match="the first NaN or Inf is the input"):
        training.fit(simulation(), [np.full_like(IMAGES, np.nan)], epochs=1)


@pytest.mark.slow
def test_layers_with_corrections_stay_frozen():
    net = convolutional()
    for name in ("depthwise", "second"):
        net.get_layer(name).trainable = False
    plan = plan_of(net)
    learned = {op: replace(config, corrections=("adaround",)) for op, config in plan.items()}
    model = training.quantization_aware(net, plan.replacing(learned), calibration=[IMAGES])
    trained = {name.split("/")[1]: k.weight.trainable for name, k in model.kernels.items()}
    assert sorted(trained.values()) == [False, False, True, True]
    assert not trained["depthwise_1"]
    assert not trained["second_1"]
    original = np.array(kernel_of(model, "depthwise"))
    training.fit(model, BATCHES, LOSS, epochs=1)
    np.testing.assert_array_equal(kernel_of(model, "depthwise"), original)


def test_a_model_that_is_no_simulation_is_refused():
    with pytest.raises(ConfigurationError, match="made by quantization_aware, got a Functional"):
        training.fit(convolutional(), [IMAGES], epochs=1)


@pytest.mark.slow
def test_weights_of_a_frozen_graph_are_trained(tmp_path):
    """Constants of a graph are weights where a layer reads them."""
    from tensorflow.python.framework.convert_to_constants import (
        convert_variables_to_constants_v2,
    )

    net = convolutional()
    function = tf.function(net).get_concrete_function(tf.TensorSpec([None, 8, 8, 1]))
    graph = convert_variables_to_constants_v2(function).graph.as_graph_def()
    file = tmp_path / "net.pb"
    file.write_bytes(graph.SerializeToString())
    adaptor = adaptor_for(net)
    plan = uniform(adaptor.space(adaptor.load(str(file)), machine()), "int8")
    model = training.quantization_aware(file, plan, calibration=[IMAGES])
    progress = training.fit(model, BATCHES, LOSS, epochs=3, learning_rate=5e-3)
    assert progress.losses[-1] < progress.losses[0]
    assert distance(model, training.finish(model)) < 1e-2


def test_watch_stops_the_training_of_a_simulation_and_names_the_layer():
    model = simulation()
    compile_briefly(model, keras.optimizers.Adam(1e-3), LOSS)
    watch = training.Watch(2)
    losses = watch_losses(model, watch)
    assert np.isfinite(losses).all()
    assert watch.finding is None
    kernel = kernel_of(model, "head")
    kernel.assign(kernel * np.nan)
    with pytest.raises(TrainingError, match="2 steps in a row.*weights of 'head_weight'"):
        watch_losses(model, watch)
    assert watch.finding.layer == "head_weight"


def watch_losses(model, watch):
    """Train by `fit` with a watch, and return the losses."""
    labels = np.concatenate([labels for _, labels in BATCHES])
    return model.fit(IMAGES, labels, 16, 2, verbose=0, callbacks=[watch]).history["loss"]
