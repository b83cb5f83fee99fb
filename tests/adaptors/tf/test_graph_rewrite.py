"""TensorFlow's own pass, on and off: what it does is seen in the numbers that come out."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from machine import has_rewrite_pass

from neural_mp import AutoMixedPrecisionOptions
from neural_mp.adaptors.tensorflow.amp_pass import PREFIX
from neural_mp.errors import ConfigurationError, UnknownOperatorError, UnsupportedPrecisionError
from neural_mp.training import disable_graph_rewrite, enable_graph_rewrite, graph_rewrite
from neural_mp.util.system.environment import restore_users_environment

DRAWN = np.random.default_rng(0)
DATA = DRAWN.random((8, 64), np.float32)
WEIGHT = tf.constant(DRAWN.random((64, 64), np.float32))
PASSES = ("auto_mixed_precision_onednn_bfloat16", "auto_mixed_precision")
pytestmark = pytest.mark.skipif(
    not has_rewrite_pass(), reason="TensorFlow's pass for BF16 does nothing on this machine"
)


@pytest.fixture(autouse=True)
def _off_again():
    yield
    disable_graph_rewrite()


@pytest.fixture
def two_layers():
    @tf.function
    def run(x):
        hidden = tf.nn.relu(tf.matmul(x, WEIGHT) + 1.0)
        return tf.identity(tf.nn.relu(tf.matmul(hidden, WEIGHT)))

    return run


def is_bf16(values) -> bool:
    """Whether every number has no more than the 8 significant bits of BF16."""
    return bool((np.asarray(values, np.float32).view(np.uint32) & 0xFFFF == 0).all())


def test_on_and_off_again(two_layers):
    original = two_layers(DATA)
    assert not is_bf16(original)
    enable_graph_rewrite()
    low = two_layers(DATA)
    assert is_bf16(low)
    np.testing.assert_allclose(low, original, rtol=0.02)  # two roundings of 2⁻⁸, and those within
    disable_graph_rewrite()
    np.testing.assert_array_equal(two_layers(DATA), original)


def test_what_was_set_before_is_set_again(monkeypatch, two_layers):
    monkeypatch.setenv(f"{PREFIX}DENYLIST_ADD", "Softplus")
    monkeypatch.setenv(f"{PREFIX}INFERLIST_REMOVE", "Softplus")
    mine = {key: value for key, value in os.environ.items() if key.startswith(PREFIX)}
    options = {"inferlist_remove": "Tanh", "denylist_add": "Tanh"}
    with graph_rewrite(amp=AutoMixedPrecisionOptions(**options)):
        assert os.environ[f"{PREFIX}DENYLIST_ADD"] == "Tanh"
        assert tf.config.optimizer.get_experimental_options()[PASSES[0]]
        with graph_rewrite("bf16"):
            assert os.environ[f"{PREFIX}DENYLIST_ADD"] == "Softplus"
        assert os.environ[f"{PREFIX}DENYLIST_ADD"] == "Tanh"
    assert {key: value for key, value in os.environ.items() if key.startswith(PREFIX)} == mine
    assert not any(tf.config.optimizer.get_experimental_options().get(name) for name in PASSES)


def test_contexts_may_end_in_any_order():
    first, second = graph_rewrite("bf16"), graph_rewrite("bf16")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert tf.config.optimizer.get_experimental_options()[PASSES[0]]
    disable_graph_rewrite()  # only what enable_graph_rewrite has switched on
    assert tf.config.optimizer.get_experimental_options()[PASSES[0]]
    second.__exit__(None, None, None)
    assert not tf.config.optimizer.get_experimental_options()[PASSES[0]]


def test_what_we_set_is_not_read_back_as_the_users_wish():
    enable_graph_rewrite("bf16", AutoMixedPrecisionOptions(allowlist_remove="Einsum"))
    assert os.environ[f"{PREFIX}ALLOWLIST_REMOVE"] == "Einsum"
    assert restore_users_environment().get(f"{PREFIX}ALLOWLIST_REMOVE") is None
    enable_graph_rewrite("bf16")
    assert f"{PREFIX}ALLOWLIST_REMOVE" not in os.environ


def test_lists_are_handed_to_it(two_layers):
    moved = AutoMixedPrecisionOptions(allowlist_remove="MatMul", denylist_add=["MatMul"])
    with graph_rewrite("bf16", moved):
        assert not is_bf16(two_layers(DATA))


def test_the_level_that_the_environment_names_is_handed_to_it(monkeypatch):
    def product_and_sum(x):
        return tf.identity(tf.matmul(x, WEIGHT) + 0.001)

    level = f"{PREFIX}LEVEL"
    with graph_rewrite("bf16"):
        assert is_bf16(tf.function(product_and_sum)(DATA))
    monkeypatch.setenv(level, "treat_infer_as_deny")
    with graph_rewrite("bf16"):
        assert os.environ[level] == "TREAT_INFER_AS_DENY"
        low = tf.function(product_and_sum)(DATA)
    assert not is_bf16(low)  # the addition, on INFER, is in float32; the product is not
    assert not np.array_equal(low, product_and_sum(DATA))
    for value, message in (
        ("UNSAFE_FORCE_ALL", f"{level} is set, but"),
        ("ALL", "cannot be 'ALL'; known are"),
    ):
        monkeypatch.setenv(level, value)
        with pytest.raises(ConfigurationError, match=message):
            enable_graph_rewrite("bf16")


def test_it_says_what_it_did_where_asked(two_layers, tmp_path):
    with graph_rewrite("bf16", AutoMixedPrecisionOptions(log_path=tmp_path / "new" / "log")):
        two_layers(DATA)
    names = [path.name for path in (tmp_path / "new" / "log").iterdir()]
    assert any(name.startswith("paintbuckets") for name in names)


@pytest.mark.slow
def test_a_keras_model_is_trained_with_it():
    keras.utils.set_random_seed(0)
    net = keras.Sequential([keras.Input((64,)), layers.Dense(32, "relu"), layers.Dense(4)])
    net.compile("sgd", "mse", jit_compile=False)
    labels = DRAWN.random((8, 4), np.float32)
    plain = net.predict(DATA, verbose=0)
    with graph_rewrite("bf16"):
        low = net.predict(DATA, verbose=0)
        losses = net.fit(DATA, labels, epochs=5, verbose=0).history["loss"]
    assert losses[-1] < losses[0]
    assert not np.array_equal(low, plain)
    np.testing.assert_allclose(low, plain, atol=0.02)
    assert net.weights[0].dtype == "float32"


def test_what_it_cannot_do_is_said_before_anything_is_set(two_layers):
    for arguments in (("bf16,fp16",), ("bf16", AutoMixedPrecisionOptions(data_type="fp16"))):
        with pytest.raises(ConfigurationError, match="requires a single 16-bit precision"):
            enable_graph_rewrite(*arguments)
    with pytest.raises(ConfigurationError, match="amp must be AutoMixedPrecisionOptions"):
        enable_graph_rewrite("bf16", {"denylist_add": "Tanh"})
    with pytest.raises(UnsupportedPrecisionError, match="got int8"):
        enable_graph_rewrite("int8")
    with pytest.raises(UnsupportedPrecisionError, match="fp16 requires a GPU"):
        enable_graph_rewrite(amp=AutoMixedPrecisionOptions(data_type="FLOAT16"))
    with pytest.raises(UnknownOperatorError, match="did you mean 'MatMul'"):
        enable_graph_rewrite("bf16", AutoMixedPrecisionOptions(allowlist_remove="MatMull"))
    with pytest.raises(ConfigurationError, match="remove the type from that list"):
        enable_graph_rewrite("bf16", AutoMixedPrecisionOptions(denylist_add="MatMul"))
    with pytest.raises(ConfigurationError, match="amp.unsafe_force_all is set"):
        enable_graph_rewrite("bf16", AutoMixedPrecisionOptions(unsafe_force_all=True))
    assert not is_bf16(two_layers(DATA))
