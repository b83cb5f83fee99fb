"""Presets of AMD Quark, by the interpreter of an environment with `amd-quark`.

    QUARK_PYTHON benchmarks/peers/amd_quark.py MODEL.onnx CALIBRATION.npz PRESET RESULT.onnx

The arrays of the file are named `sample/input`. The script imports nothing of this repository.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

PRESETS = ("XINT8", "A8W8", "A16W8")
#: Seconds for one preset of one net.
_MAX_SECONDS = 900


def write_preset(
    python: str, path: Path, feeds: list[Mapping[str, np.ndarray]], preset: str, file: Path
) -> None:
    """Write a net quantized by a preset, in a process of the given interpreter.

    Raises:
        RuntimeError: Quark fails; the message has the end of its log.
    """
    samples = file.with_suffix(".npz")
    arrays = {f"{i}/{name}": array for i, feed in enumerate(feeds) for name, array in feed.items()}
    np.savez(samples, **arrays)  # type: ignore[arg-type]  # all keys are arrays
    model, data, result = (str(item.resolve()) for item in (path, samples, file))
    command = [python, str(Path(__file__).resolve()), model, data, preset, result]
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=_MAX_SECONDS,
        env=environment,
        cwd=file.parent,  # Quark writes tables of its own into the current folder
        check=False,
    )
    if done.returncode or not file.exists():
        raise RuntimeError(f"Quark's {preset} failed: {done.stderr.strip()[-300:]}")


def _samples(file: str) -> Iterator[dict[str, np.ndarray]]:
    with np.load(file) as arrays:
        feeds: dict[str, dict[str, np.ndarray]] = {}
        for key in arrays:
            index, name = key.split("/", 1)
            feeds.setdefault(index, {})[name] = arrays[key]
    return iter(feeds.values())


def _quantize(path: str, samples: str, preset: str, file: str) -> None:
    import quark.onnx as quark
    from onnxruntime.quantization import CalibrationDataReader

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.reset_iter()

        def reset_iter(self) -> None:
            self._waiting = _samples(samples)

        def get_next(self) -> Any:
            return next(self._waiting, None)

    config = getattr(quark, f"{preset}_QCONFIG", None) or getattr(quark, preset)
    quark.ModelQuantizer(config).quantize_model(path, file, Reader())


if __name__ == "__main__":
    _quantize(*sys.argv[1:])
