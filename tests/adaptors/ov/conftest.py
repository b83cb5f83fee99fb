"""Trained nets on scikit-learn's digits, in OpenVINO."""

from typing import Any

import pytest
from machine import DENSE, products_here
from nets import hostile
from ov_nets import as_openvino, require_low_bits

from neural_mp.core.int8_accumulation import Int8Accumulation


@pytest.fixture(scope="session")
def low_bit_kernels():
    """Kernels for 4-bit weights as stored; a test without them is skipped."""
    require_low_bits()


@pytest.fixture
def exact_products():
    """Dense layers that add up bytes without saturation; a test without them is skipped."""
    if products_here("openvino", DENSE) is not Int8Accumulation.EXACT:
        pytest.skip("sums of products of bytes saturate on this CPU")


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
