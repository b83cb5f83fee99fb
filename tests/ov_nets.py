"""Small nets as `openvino.Model`."""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx_nets import as_onnx
from torch import nn

from neural_mp.adaptors.openvino.runtime import Runner, core


def as_openvino(net: nn.Module, **options: Any) -> Any:
    """Return a net as OpenVINO reads it from an ONNX file."""
    return core().read_model(as_onnx(net, **options).SerializeToString())


def run(model: Any, *inputs: np.ndarray) -> list[np.ndarray]:
    """Return OpenVINO's own FP32 outputs."""
    return Runner(model)(list(inputs))
