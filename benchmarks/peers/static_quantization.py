"""ONNX Runtime's own tool, `quantize_static`, as all benchmarks call it: weights per channel."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from onnxruntime.quantization import CalibrationDataReader, QuantType, quantize_static

Feeds = dict[str, np.ndarray]


class _Reader(CalibrationDataReader):
    """Calibration batches, each read once."""

    def __init__(self, feeds: Iterable[Feeds]) -> None:
        self._feeds = iter(feeds)

    def get_next(self) -> Feeds | None:
        return next(self._feeds, None)


def write_static(source: Path, target: Path, feeds: Iterable[Feeds]) -> None:
    """Write the INT8 of an ONNX file, calibrated with batches of inputs by name."""
    quantize_static(
        str(source),
        str(target),
        _Reader(feeds),
        per_channel=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
