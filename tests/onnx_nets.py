"""The tests' nets as ONNX, and what ONNX Runtime makes of a model by itself."""

from __future__ import annotations

import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
import torch
from torch import nn


def as_onnx(net: nn.Module, opset: int = 20) -> onnx.ModelProto:
    """What torch's exporter writes, with an open batch; [batch, 1, 8, 8] → logits."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "net.onnx"
        torch.onnx.export(
            net.eval(),
            (torch.rand(2, 1, 8, 8),),
            str(path),
            input_names=["image"],
            output_names=["logits"],
            dynamic_shapes=({0: torch.export.Dim("batch")},),
            opset_version=opset,
            dynamo=True,
            external_data=False,
            verbose=False,
        )
        return onnx.load(path)


def session(model: onnx.ModelProto | str, **settings: Any) -> ort.InferenceSession:
    """A session as a user makes one."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    for name, value in settings.items():
        setattr(options, name, value)
    source = model if isinstance(model, str) else model.SerializeToString()
    return ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])


def run(model: onnx.ModelProto | str, **feeds: np.ndarray) -> list[np.ndarray]:
    """What ONNX Runtime computes, without us."""
    return session(model).run(None, feeds)


def kernels(model: onnx.ModelProto | str) -> Counter[str]:
    """The ops that are left when ONNX Runtime has made kernels of a model."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimized.onnx")
        session(model, optimized_model_filepath=path)
        return Counter(node.op_type for node in onnx.load(path).graph.node)
