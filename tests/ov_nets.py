"""Small nets as `openvino.Model`."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx_nets import as_onnx
from torch import nn

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
