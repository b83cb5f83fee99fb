"""A net and its data, and nets of torch as ONNX files."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

Arrays = tuple[np.ndarray, ...]
BATCH = {0: "batch"}


@dataclass(frozen=True)
class Case:
    """A model and its data.

    Attributes:
        build: makes the model, in evaluation mode.
        draw: number, seed → samples.
        names: the inputs.
        batches: the batch sizes to time.
        judged: samples that outputs are compared on.
    """

    build: Callable[[], nn.Module]
    draw: Callable[[int, int], Arrays]
    names: tuple[str, ...] = ("image",)
    batches: tuple[int, ...] = (1, 8)
    judged: int = 32

    def cut(self, samples: int, seed: int, size: int) -> Iterator[Arrays]:
        """Yield samples in batches."""
        arrays = self.draw(samples, seed)
        for start in range(0, samples, size):
            yield tuple(array[start : start + size] for array in arrays)


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
        output_names=options.pop("output_names", ["result"]),
        dynamic_shapes=tuple(axes for _ in inputs) if axes else None,
        dynamo=True,
        external_data=False,
        verbose=False,
        **options,
    )
    return str(path)
