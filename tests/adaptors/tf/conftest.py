"""Keras nets on scikit-learn's digits, with channels last as TensorFlow has them."""

import warnings
from collections.abc import Callable
from functools import partial

import keras
import pytest
from keras_nets import channels_last, deep_net, hostile, small_net, train_once
from tensorflow.python.training.experimental import mixed_precision_global_state

from neural_mp.adaptors.tensorflow.training.graph_rewrite_state import rewrite_is_enabled
from neural_mp.training import (
    disable_mixed_precision_graph_rewrite,
    enable_mixed_precision_graph_rewrite,
)


@pytest.fixture(autouse=True)
def _same_weights_on_every_run():
    keras.utils.set_random_seed(0)


@pytest.fixture(scope="session")
def digits():
    """Training and test split; images [8, 8, 1] in 0…1."""
    return channels_last()


@pytest.fixture(scope="session")
def trained(digits, write_once) -> Callable[[Callable[[], keras.Model], int], keras.Model]:
    """Function: the net of a function after some epochs, the same on every run."""
    return partial(train_once, digits[0], write_once)


@pytest.fixture(scope="session")
def net(trained) -> keras.Model:
    """A small trained residual net with batch norms."""
    return trained(small_net, 8)


@pytest.fixture(scope="session")
def deep(trained) -> keras.Model:
    """A trained net of 8 convolutions and 1 dense layer."""
    return trained(deep_net, 10)


@pytest.fixture(scope="session")
def hostile_net(deep) -> keras.Model:
    """The same function, with one channel ×1024 between convolutions 2 and 3."""
    return hostile(deep)


@pytest.fixture
def rewrite_disabled_afterwards():
    """Disables the graph rewrite and resets the dtype policy after the test.

    Sessions of other tests do not count, as in a new process: for their sake, every rewrite that is
    enabled would look through all objects.
    """
    mixed_precision_global_state.set_non_mixed_precision_session_created(False)
    yield
    keras.config.set_dtype_policy("float32")
    if rewrite_is_enabled():
        disable_mixed_precision_graph_rewrite()


@pytest.fixture
def enabled_rewrite():
    """The rewrite, enabled for an optimizer of Keras, with no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        return enable_mixed_precision_graph_rewrite(keras.optimizers.SGD(0.05))
