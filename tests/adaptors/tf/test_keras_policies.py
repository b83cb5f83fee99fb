"""Policies of Keras: set where the machine is made for them, with layers kept and losses scaled."""

import subprocess
import sys

import keras
import numpy as np
import pytest
from keras import layers

from neural_mp.core.hardware import Hardware
from neural_mp.core.precision import Precision
from neural_mp.errors import ConfigurationError, UnsupportedPrecisionError
from neural_mp.training import (
    LossScaleOptimizer,
    devices,
    is_gpu_available,
    kept_layers,
    policies,
    set_policy,
    supported_policies,
)

PLAIN = Hardware("plain", frozenset())
WITH_BF16 = Hardware("with bf16", frozenset({"avx512_bf16"}))


def on(monkeypatch, machine, *forced):
    from dataclasses import replace

    monkeypatch.setattr(policies, "detect", lambda: replace(machine, forced=frozenset(forced)))


@pytest.fixture(autouse=True)
def _float32_again():
    yield
    set_policy("float32")


@pytest.fixture
def everything_forced(monkeypatch):
    monkeypatch.setenv("FORCE_BF16", "1")
    monkeypatch.setenv("FORCE_FP16", "1")


@keras.saving.register_keras_serializable("tests")
class Block(layers.Layer):
    """A layer with layers in it, one of which has nothing to build."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = layers.Dense(8, name="inner")
        self.softmax = layers.Softmax(name="weights")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.softmax(self.dense(x))


def net():
    inputs = keras.Input((64,))
    x = layers.Dense(16, "relu", name="first")(inputs)
    x = Block(name="block")(x)
    x = layers.Dense(10, name="logits")(x)
    return keras.Model(inputs, layers.Softmax(name="predictions")(x))


def computes_in(model):
    flattened = model._flatten_layers(include_self=False)
    inner = [layer for layer in flattened if not isinstance(layer, layers.InputLayer)]
    return {layer.name: layer.compute_dtype for layer in inner}


def fit(model, digits, epochs=1, **options):
    model.compile("adam", "sparse_categorical_crossentropy", jit_compile=False, **options)
    images, labels = digits[0].images.reshape(-1, 64)[:256], digits[0].labels[:256]
    return model.fit(images, labels, epochs=epochs, verbose=0)


def test_what_there_is_to_train_on_is_said_in_words():
    hardware = devices()
    assert any(device.framework == "tensorflow" and device.kind == "cpu" for device in hardware)
    assert is_gpu_available() == any(device.kind != "cpu" for device in hardware)
    assert "tensorflow: cpu, CPU" in map(str, hardware)


def test_a_policy_is_for_machines_that_run_it(monkeypatch):
    on(monkeypatch, WITH_BF16)
    supported = supported_policies("cpu")
    assert supported["mixed_bfloat16"].available
    assert supported["mixed_bfloat16"].native
    assert not supported["mixed_float16"].available
    assert "float16 requires a GPU" in supported["mixed_float16"].reason
    on(monkeypatch, PLAIN, Precision.BF16, Precision.FP16)
    forced = supported_policies("cpu")
    assert all(support.available and not support.native for support in forced.values())
    assert "forced by FORCE_BF16=1" in forced["mixed_bfloat16"].reason
    with pytest.raises(ConfigurationError, match="did you mean 'gpu'"):
        supported_policies("gpus")


@pytest.mark.skipif(is_gpu_available(), reason="speaks of machines without a GPU")
def test_what_the_machine_lacks_is_refused_unless_it_is_forced(monkeypatch):
    assert not any(support.available for support in supported_policies("gpu").values())
    on(monkeypatch, PLAIN)
    with pytest.raises(UnsupportedPrecisionError, match="FORCE_BF16=1"):
        set_policy("mixed_bfloat16")
    with pytest.raises(UnsupportedPrecisionError, match="FORCE_FP16=1"):
        set_policy("mixed_float16")
    assert keras.config.dtype_policy().name == "float32"
    on(monkeypatch, PLAIN, Precision.BF16)
    set_policy("mixed_bfloat16")
    assert layers.Dense(1).compute_dtype == "bfloat16"
    assert layers.Dense(1, dtype="float32").compute_dtype == "float32"
    set_policy("float32")
    assert layers.Dense(1).compute_dtype == "float32"


@pytest.mark.slow
def test_layers_are_kept_by_name_with_all_that_is_in_them(everything_forced, digits):
    set_policy("mixed_bfloat16", keep=("predictions", "block"))
    model = net()
    assert model.outputs[0].dtype == "float32"
    fit(model, digits)
    assert computes_in(model) == {
        "first": "bfloat16",
        "block": "float32",
        "inner": "float32",
        "weights": "float32",
        "logits": "bfloat16",
        "predictions": "float32",
    }
    assert set(kept_layers(model)) == {"block", "block/inner", "weights", "predictions"}


@pytest.mark.parametrize("keep", ["block/inner", "in+er", ["inner"]])
def test_a_layer_within_another_is_kept_by_path_name_or_expression(everything_forced, keep):
    set_policy("mixed_bfloat16", keep=keep)
    dtypes = computes_in(net())
    assert (dtypes["inner"], dtypes["block"]) == ("float32", "bfloat16")


def test_a_name_that_fits_no_layer_is_an_error_with_the_nearest(everything_forced):
    set_policy("mixed_bfloat16", keep=("prediction",))
    model = net()
    for action in (kept_layers, lambda model: model.compile("adam", "mse")):
        with pytest.raises(ConfigurationError, match=r"'prediction', .*did you mean 'predictions'"):
            action(model)


def test_a_name_of_another_model_is_no_error(everything_forced):
    set_policy("mixed_bfloat16", keep=("predictions",))
    net().compile("adam", "mse")
    regressor = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    regressor.compile("adam", "mse")
    assert kept_layers(regressor) == ()


@pytest.mark.slow
def test_a_file_with_kept_layers_loads_where_this_package_is_missing(everything_forced, tmp_path):
    set_policy("mixed_bfloat16", keep=("predictions", "inner"))
    inputs = keras.Input((4,))
    x = layers.Dense(4, name="inner")(layers.Dense(4, name="first")(inputs))
    keras.Model(inputs, layers.Softmax(name="predictions")(x)).save(tmp_path / "net.keras")
    code = (
        "import sys; sys.modules['neural_mp'] = None\n"
        "import keras\n"
        f"model = keras.saving.load_model({str(tmp_path / 'net.keras')!r})\n"
        "print([layer.compute_dtype for layer in model.layers[1:]])"
    )
    run = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    assert run.stdout.split("\n")[-2] == "['bfloat16', 'float32', 'float32']"


def one_layer_in_float16(**options):
    inputs = keras.Input((64,))
    x = layers.Dense(16, "relu", **options)(inputs)
    return keras.Model(inputs, layers.Dense(10, "softmax", dtype="float32", name="out")(x))


@pytest.mark.slow
def test_the_loss_is_scaled_for_the_policy_of_a_single_layer(everything_forced, digits):
    set_policy("float32")
    model = one_layer_in_float16(dtype="mixed_float16")
    fit(model, digits, epochs=2)
    assert isinstance(model.optimizer, LossScaleOptimizer)
    assert int(model.optimizer.iterations) + model.optimizer.skipped_steps == 16
    assert isinstance(model.optimizer.inner_optimizer, keras.optimizers.Adam)


@pytest.mark.slow
def test_the_loss_is_scaled_for_a_map_of_policies(everything_forced, digits):
    set_policy("mixed_float16", keep="out")
    model = one_layer_in_float16()
    fit(model, digits)
    assert isinstance(model.optimizer, LossScaleOptimizer)


@pytest.mark.slow
def test_the_loss_is_scaled_only_where_a_layer_needs_it(everything_forced, digits):
    set_policy("mixed_bfloat16", keep="out")
    model = one_layer_in_float16()
    fit(model, digits)
    assert type(model.optimizer) is keras.optimizers.Adam
    set_policy("mixed_float16", keep="out")
    model = one_layer_in_float16()
    fit(model, digits, auto_scale_loss=False)
    assert type(model.optimizer) is keras.optimizers.Adam


def test_a_compiled_model_is_read_from_its_file_as_before(everything_forced, tmp_path):
    set_policy("mixed_float16", keep="out")
    model = one_layer_in_float16()
    model.compile("adam", "mse")
    model.save(tmp_path / "net.keras")
    again = keras.saving.load_model(tmp_path / "net.keras")
    assert again.compiled
    assert again.loss == "mse"
    assert isinstance(again.optimizer, LossScaleOptimizer)


def test_an_optimizer_that_scales_already_is_left(everything_forced):
    set_policy("mixed_float16", keep="out")
    model = one_layer_in_float16()
    mine = LossScaleOptimizer(keras.optimizers.SGD(), 1024)
    model.compile(mine, "mse")
    assert model.optimizer is mine
    stock = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    model.compile(stock, "mse")
    assert model.optimizer is stock


@pytest.mark.slow
def test_a_model_whose_layers_come_later_is_scaled_and_learns(everything_forced, digits):
    class Later(keras.Model):
        def __init__(self):
            super().__init__()
            self.first = layers.Dense(16, "relu", name="first")
            self.out = layers.Dense(10, "softmax", name="out")

        def call(self, x):
            return self.out(self.first(x))

    set_policy("mixed_float16", keep="out")
    model = Later()
    losses = fit(model, digits, epochs=5).history["loss"]
    assert losses[-1] < losses[0]
    assert np.isfinite(losses).all()
    assert computes_in(model) == {"first": "float16", "out": "float32"}
    assert isinstance(model.optimizer, LossScaleOptimizer)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("mixed_bf16",), "policy must be .*, got 'mixed_bf16'; did you mean 'mixed_bfloat16'"),
        (("mixed_bfloat16", 3), "keep must be names of layers"),
        (("mixed_bfloat16", [1]), "keep must be names of layers"),
        (("mixed_bfloat16", ["(out"]), "keep must contain names or regular expressions"),
        (("float32", ["out"]), "keep must be empty for policy float32"),
    ],
)
def test_bad_options_are_named(everything_forced, given, said):
    with pytest.raises(ConfigurationError, match=said.replace("(", r"\(")):
        set_policy(*given)


def test_only_keras_models_have_layers_to_keep():
    with pytest.raises(ConfigurationError, match="model must be a Keras model, got 3"):
        kept_layers(3)


@pytest.mark.slow
def test_a_model_that_is_loaded_is_compiled_as_it_was(everything_forced, digits, tmp_path):
    set_policy("mixed_float16", keep="out")
    model = one_layer_in_float16()
    fit(model, digits)
    model.save(tmp_path / "net.keras")
    again = keras.saving.load_model(tmp_path / "net.keras")
    assert isinstance(again.optimizer, LossScaleOptimizer)
    assert int(again.optimizer.iterations) == int(model.optimizer.iterations)
    images = digits[0].images.reshape(-1, 64)[:64]
    assert np.isfinite(again.fit(images, digits[0].labels[:64], verbose=0).history["loss"][0])


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [lambda: keras.config.set_dtype_policy("float32"), keras.utils.clear_session]
)
def test_names_count_no_more_once_keras_has_another_policy(everything_forced, change):
    set_policy("mixed_bfloat16", keep="out")
    change()
    model = keras.Sequential([keras.Input((4,)), layers.Dense(1)])
    model.compile("adam", "mse")
    assert kept_layers(model) == ()
