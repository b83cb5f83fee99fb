"""Presets of ONNX Runtime for the NPU of Qualcomm: one precision for the whole model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize
from onnxruntime.quantization.execution_providers.qnn import (
    get_qnn_qdq_config,
    qnn_preprocess_model,
)
from onnxruntime.quantization.shape_inference import quant_pre_process
from rich.console import Console

from benchmarks.real.case import Batches, Metric

#: Preset → types of activations and weights.
PRESETS = {
    "W8A8": (QuantType.QUInt8, QuantType.QUInt8),
    "W8A16": (QuantType.QUInt16, QuantType.QUInt8),
}
Feeds = Mapping[str, np.ndarray]


class Samples(CalibrationDataReader):
    """Batches of inputs by name, as the tools of ONNX Runtime and of AMD read them."""

    def __init__(self, feeds: list[Feeds]) -> None:
        self._feeds = feeds
        self.rewind()

    def rewind(self) -> None:
        """Start again."""
        self._waiting: Iterator[Feeds] = iter(self._feeds)

    def get_next(self) -> Feeds | None:
        """Return the next batch, as the base class asks for."""
        return next(self._waiting, None)


def feeds_of(path: Path, batches: Batches) -> list[Feeds]:
    """Return the inputs of all batches by name."""
    graph = onnx.load(path, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    names = [value.name for value in graph.input if value.name not in constants]
    return [x if isinstance(x, Mapping) else {names[0]: x} for x, _ in batches]


def write_preset(path: Path, calibration: Batches, preset: str, file: Path) -> None:
    """Write a net quantized by a preset."""
    activation, weight = PRESETS[preset]
    prepared = _prepared(path, file)
    config = get_qnn_qdq_config(
        prepared,
        Samples(feeds_of(path, calibration)),
        activation_type=activation,
        weight_type=weight,
    )
    quantize(prepared, file, config)


def _prepared(path: Path, file: Path) -> Path:
    """Return the net after both steps that the documentation asks for, as far as they succeed."""
    folded = file.with_suffix(".folded.onnx")
    try:
        quant_pre_process(path, folded, skip_symbolic_shape=True)
        model = onnx.load(folded)
        del model.metadata_props[:]  # on which the next step fails
        onnx.save(model, folded)
        path, prepared = folded, file.with_suffix(".qnn.onnx")
        if qnn_preprocess_model(path, prepared):
            return prepared
    except Exception as error:  # noqa: BLE001 – whatever the parts of the tool raise
        Console().print(f"preparation for presets: {type(error).__name__}: {str(error)[:100]}")
    return path


def quality_of(path: Path, batches: Batches, metric: Metric) -> float:
    """Return the metric of a file that the CPU provider computes as written."""
    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.add_session_config_entry("session.disable_quant_qdq", "1")
    session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    metric.reset()
    for feeds, (_, labels) in zip(feeds_of(path, batches), batches, strict=True):
        outputs = session.run(None, dict(feeds))
        metric.update(outputs[0] if len(outputs) == 1 else outputs, labels)
    return metric.result()
