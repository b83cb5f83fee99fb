"""Trained nets on scikit-learn's digits, as ONNX."""

import onnx
import pytest
from nets import hostile
from onnx_nets import as_onnx


@pytest.fixture(scope="session")
def _exported(_trained):
    small, deep = _trained
    return {"small": as_onnx(small), "deep": as_onnx(deep), "hostile": as_onnx(hostile(deep))}


@pytest.fixture(scope="session")
def net(_exported) -> onnx.ModelProto:
    """A small trained residual net."""
    return _exported["small"]


@pytest.fixture(scope="session")
def deep(_exported) -> onnx.ModelProto:
    """A trained net of 8 convolutions and 1 dense layer."""
    return _exported["deep"]


@pytest.fixture(scope="session")
def hostile_net(_exported) -> onnx.ModelProto:
    """The same function, with one channel ×1024 between convolutions 2 and 3."""
    return _exported["hostile"]


@pytest.fixture
def net_file(net, tmp_path) -> str:
    """The small net as a file."""
    onnx.save(net, tmp_path / "net.onnx")
    return str(tmp_path / "net.onnx")
