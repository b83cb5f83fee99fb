"""Trained nets on scikit-learn's digits, in OpenVINO."""

from typing import Any

import pytest
from nets import hostile
from ov_nets import as_openvino, require_low_bits


@pytest.fixture(scope="session")
def low_bit_kernels():
    """Kernels for 4-bit weights as stored; a test without them is skipped."""
    require_low_bits()


@pytest.fixture(scope="session")
def _taken_in(_trained):
    small, deep = _trained
    nets = {"small": small, "deep": deep, "hostile": hostile(deep)}
    return {name: as_openvino(net) for name, net in nets.items()}


@pytest.fixture
def net(_taken_in) -> Any:
    """A small trained residual net."""
    return _taken_in["small"]


@pytest.fixture
def deep(_taken_in) -> Any:
    """A trained net of 8 convolutions and 1 dense layer."""
    return _taken_in["deep"]


@pytest.fixture
def hostile_net(_taken_in) -> Any:
    """The same function, with one channel ×1024 between convolutions 2 and 3."""
    return _taken_in["hostile"]
