"""NNCF's INT8 of ONNX files, by the interpreter of an environment with `nncf`.

    NNCF_PYTHON benchmarks/peers/nncf_onnx.py MODEL.onnx SAMPLES.npz transformer|none RESULT.onnx

The arrays of the file are named `sample/input`.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

#: Seconds for one net.
_MAX_SECONDS = 1200


def write_nncf(
    python: str, path: Path, feeds: list[Mapping[str, np.ndarray]], kind: str, file: Path
) -> None:
    """Write a net quantized by NNCF, in a process of the given interpreter.

    Raises:
        RuntimeError: NNCF fails; the message has the end of its log.
    """
    samples = file.with_suffix(".npz")
    arrays = {f"{i}/{name}": array for i, feed in enumerate(feeds) for name, array in feed.items()}
    np.savez(samples, **arrays)  # type: ignore[arg-type]  # all keys are arrays
    command = [python, __file__, *map(str, (path, samples, kind, file))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=_MAX_SECONDS, check=False
    )
    if done.returncode or not file.exists():
        raise RuntimeError(f"NNCF failed: {done.stderr.strip()[-300:]}")


def _quantize(path: str, samples: str, kind: str, file: str) -> None:
    import nncf
    import onnx

    feeds: dict[str, dict[str, np.ndarray]] = {}
    with np.load(samples) as arrays:
        for key in arrays:
            index, name = key.split("/", 1)
            feeds.setdefault(index, {})[name] = arrays[key]
    model_type = nncf.ModelType.TRANSFORMER if kind == "transformer" else None
    dataset = nncf.Dataset(list(feeds.values()))
    options = {"model_type": model_type, "subset_size": len(feeds)}
    onnx.save(nncf.quantize(onnx.load(path), dataset, **options), file)


if __name__ == "__main__":
    _quantize(*sys.argv[1:])
