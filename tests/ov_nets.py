"""Small nets as `openvino.Model`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx_nets import as_onnx
from torch import nn

from neural_mp.adaptors.openvino.graph import integer_weights
from neural_mp.adaptors.openvino.ops import Role
from neural_mp.adaptors.openvino.runtime import Runner, ov


def as_openvino(net: nn.Module, **options: Any) -> Any:
    """Return a net as OpenVINO reads it from an ONNX file."""
    return read(as_onnx(net, **options))


def read(model: onnx.ModelProto) -> Any:
    """Return a model as OpenVINO reads it from an ONNX file."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        onnx.save(model, path)
        # A copy, since the weights of the original are mapped from the file.
        return ov.convert_model(path).clone()


def run(model: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return OpenVINO's own FP32 outputs."""
    return Runner(model)(list(inputs))


def require_low_bits() -> None:
    """Skip a test where OpenVINO has no kernel for 4-bit weights as stored on this CPU."""
    offered = integer_weights.low_bit_specs(Role.PRODUCT, 64, 64)
    if isinstance(offered, str):
        pytest.skip(offered)


def require_by_channel() -> None:
    """Skip a test where OpenVINO restores INT8 weights beside float inputs to floats here."""
    if integer_weights.by_channel_spec(64, 64) is None:
        pytest.skip("this CPU has no kernel for INT8 weights as stored beside float inputs")
