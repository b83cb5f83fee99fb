"""The graph that ONNX Runtime makes of a file when it loads it."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any


def optimized_graph(file: str | Path) -> Any:
    """A `GraphProto` of its kernels, without the weights."""
    import onnx
    import onnxruntime

    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        onnxruntime.InferenceSession(str(file), options, providers=["CPUExecutionProvider"])
        return onnx.load(options.optimized_model_filepath, load_external_data=False).graph
