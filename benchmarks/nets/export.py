"""Nets of torch as ONNX files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

BATCH = {0: "batch"}


def write_onnx(
    net: Any,
    inputs: Mapping[str, np.ndarray],
    path: Path,
    free: Mapping[int, str] | None = BATCH,
    **options: Any,
) -> str:
    """Write a net as torch's exporter does; `free` are the axes of any size, by name."""
    import torch

    axes = {axis: torch.export.Dim(name) for axis, name in (free or {}).items()}
    torch.onnx.export(
        net,
        tuple(map(torch.from_numpy, inputs.values())),
        str(path),
        input_names=list(inputs),
        output_names=["result"],
        dynamic_shapes=tuple(axes for _ in inputs) if axes else None,
        dynamo=True,
        external_data=False,
        verbose=False,
        **options,
    )
    return str(path)
