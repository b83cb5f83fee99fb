"""Trained nets on scikit-learn's digits, in LiteRT."""

import pytest

pytest.importorskip("ai_edge_litert")
pytest.importorskip("tensorflow")

from keras_nets import channels_last, deep_net, hostile, small_net, train_once
from litert_nets import as_litert


@pytest.fixture(scope="session")
def digits():
    """Training and test split; images [8, 8, 1] in 0…1."""
    return channels_last()


@pytest.fixture(scope="session")
def keras_net(digits, write_once):
    """A small trained residual net of Keras."""
    return train_once(digits[0], write_once, small_net, 8)


@pytest.fixture(scope="session")
def _deep_keras(digits, write_once):
    return train_once(digits[0], write_once, deep_net, 10)


@pytest.fixture(scope="session")
def net(keras_net) -> bytes:
    """The small net as a file."""
    return as_litert(keras_net)


@pytest.fixture(scope="session")
def deep(_deep_keras) -> bytes:
    """A trained net of 8 convolutions and 1 dense layer."""
    return as_litert(_deep_keras)


@pytest.fixture(scope="session")
def hostile_file(_deep_keras) -> bytes:
    """The same function, with one channel ×1024 between convolutions 2 and 3."""
    return as_litert(hostile(_deep_keras))
