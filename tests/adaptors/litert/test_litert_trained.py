"""Keras models trained with the rounding of a plan, as `.tflite` files with the same numbers."""

from __future__ import annotations

import keras
import numpy as np
import pytest
from keras import layers
from keras_nets import compile_briefly
from litert_nets import run_litert

from neural_mp import training
from neural_mp.adaptors.registry import adaptor_for
from neural_mp.core.precision import Precision
from neural_mp.errors import ConversionError, DataError
from neural_mp.testing import machine, uniform

IMAGE = (6, 6, 4)


def make_net(shape, *body):
    """Return a sequential model; each bias is random, as after training."""
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input(shape, name="values"), *body])
    for layer in net.layers:
        if getattr(layer, "bias", None) is not None:
            layer.bias.assign(np.random.default_rng(1).normal(0, 0.1, layer.bias.shape))
    return net


def add_residual():
    """Return a net with a sum of two convolutions."""
    keras.utils.set_random_seed(0)
    image = keras.Input(IMAGE, name="values")
    x = layers.Conv2D(4, 3, padding="same", activation="relu")(image)
    x = layers.Add()([x, layers.Conv2D(4, 1, bias_initializer="normal")(x)])
    return keras.Model(image, layers.ReLU()(x))


NETS = {
    "convolution": lambda: make_net(
        IMAGE, layers.Conv2D(4, 3, activation="relu"), layers.Conv2D(4, 1)
    ),
    "batch norm": lambda: make_net(
        IMAGE, layers.Conv2D(4, 3), layers.BatchNormalization(), layers.ReLU(), layers.Conv2D(4, 1)
    ),
    "depthwise": lambda: make_net(
        IMAGE, layers.DepthwiseConv2D(3), layers.ReLU(6), layers.Conv2D(4, 1)
    ),
    "pooling": lambda: make_net(
        IMAGE, layers.Conv2D(4, 3, activation="relu"), layers.MaxPooling2D(), layers.Conv2D(4, 1)
    ),
    "dense": lambda: make_net((16,), layers.Dense(16, "relu"), layers.Dense(4)),
    "residual": add_residual,
}


def simulate(net, values):
    """Return the simulation of a net with all ops in INT8, after some steps of training."""
    adaptor = adaptor_for(net)
    plan = uniform(adaptor.space(adaptor.load(net), machine()), Precision.INT8)
    simulation = training.quantization_aware(net, plan, calibration=[values])
    compile_briefly(simulation, keras.optimizers.Adam(1e-2), "mse")
    targets = np.zeros(simulation(values).shape, np.float32)
    simulation.fit(values, targets, len(values), epochs=3, verbose=0)
    return simulation


def draw(net, samples: int = 200):
    """Return random inputs of a net."""
    size = (samples, *net.input_shape[1:])
    return np.random.default_rng(0).normal(size=size).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("name", NETS)
def test_the_file_computes_what_the_simulation_was_trained_to(name, tmp_path):
    net = NETS[name]()
    values = draw(net)
    simulation = simulate(net, values)
    result = training.finish(simulation, runtime="litert")
    assert result.framework == "litert"
    assert set(result.plan.counts()) == {"int8"}
    result.save(tmp_path / "trained.tflite")
    actual = run_litert((tmp_path / "trained.tflite").read_bytes(), values)[0]
    expected = np.asarray(simulation(values))
    # Steps of the calibrated range are larger than those of the outputs after this training.
    steps = np.abs(actual - expected) / np.abs(expected).max() * 127
    assert steps.max() < 1.5
    assert (steps > 0.75).mean() < 0.05


@pytest.mark.slow
def test_scales_and_ranges_of_the_file_are_the_trained_ones(tmp_path):
    net = NETS["convolution"]()
    simulation = simulate(net, draw(net))
    training.finish(simulation, runtime="litert").save(tmp_path / "result")
    from ai_edge_litert.interpreter import Interpreter

    details = Interpreter(str(tmp_path / "result" / "model.tflite")).get_tensor_details()
    stored = [t["quantization_parameters"]["scales"] for t in details]
    for kernel in simulation.all_kernels:
        trained = np.ravel(kernel.initial.numpy() * np.exp(kernel.log_scales.numpy()))
        assert any(s.shape == trained.shape and np.allclose(s, trained, 1e-5) for s in stored)
    for quantizer in simulation.all_quantizers:
        scale = quantizer.quant_params.scale
        assert any(np.allclose(s, scale, 1e-5) for s in stored if s.shape == (1,))


@pytest.mark.slow
def test_ops_in_float_stay_in_float():
    net = NETS["convolution"]()
    values = draw(net)
    adaptor = adaptor_for(net)
    plan = uniform(adaptor.space(adaptor.load(net), machine()), Precision.INT8)
    _, second = [op for op in plan if "onv" in op]
    plan = plan.replacing({second: type(plan[second])(Precision.FP32)})
    simulation = training.quantization_aware(net, plan, calibration=[values])
    counts = training.finish(simulation, runtime="litert").plan.counts()
    assert counts == {"int8": 1, "fp32": 1}


@pytest.mark.slow
def test_tensors_that_only_litert_quantizes_need_data():
    net = NETS["dense"]()
    values = draw(net)
    simulation = simulate(net, values)
    observed = simulation.record.opened.tunable.observations
    again = training.quantization_aware(
        net, simulation.record.opened.resolved.plan, observations=observed
    )
    with pytest.raises(DataError, match="set calibration to batches"):
        training.finish(again, runtime="litert")
    result = training.finish(again, runtime="litert", calibration=[values])
    assert result.plan.counts() == {"int8": 2}


@pytest.mark.slow
def test_a_runtime_that_takes_no_trained_scales_is_refused():
    net = NETS["dense"]()
    simulation = simulate(net, draw(net))
    with pytest.raises(ConversionError, match="weights with given scales"):
        training.finish(simulation, runtime="openvino")
