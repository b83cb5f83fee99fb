"""Torch's quantized tensors, whose kernels are faster than those on plain integers.

Quantization is vectorized, and convolutions keep what their first run sets up. Torch announces to
remove them; without them, plain integers do the same work.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import cache
from threading import Lock
from typing import Any

import torch

quantized = torch.ops.quantized

#: oneDNN's name among the engines of quantized tensors.
_ENGINE = "onednn"


@cache
def has_quantized_tensors() -> bool:
    """Whether torch has quantized tensors with oneDNN's convolutions, tried once per process."""
    one = torch.ones(1, 1, 1, 1)
    # The first quantized tensor of a process warns of their removal.
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        try:
            q = torch.quantize_per_tensor(one, 0.5, 1, torch.quint8)
            packed = packed_convolution(one.to(torch.int8), one[0, 0, 0], None, ([1], [0], [1], 1))
            found = as_uint8(quantized.conv2d.new(q, packed, 0.25, 3))
        except (AttributeError, RuntimeError):
            return False
    return found.tolist() == [[[[7]]]]


def as_uint8(q: torch.Tensor) -> torch.Tensor:
    """Return the integers of a quantized tensor in the same memory; `int_repr` copies slowly."""
    found = torch.empty(0, dtype=torch.uint8)
    return found.set_(q.untyped_storage(), q.storage_offset(), q.shape, q.stride())


def packed_convolution(
    weight: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None,
    geometry: tuple[Any, Any, Any, int],
) -> Any:
    """Return what a convolution of quantized tensors reads instead of a weight.

    Args:
        weight: int8 [outputs, inputs, height, width].
        scales: one per output.
        bias: float32, or None.
        geometry: stride, padding and dilation of both axes or one for both, and groups.
    """
    zeros = torch.zeros(len(weight), dtype=torch.long)
    tensor = torch._make_per_channel_quantized_tensor(weight, scales.double(), zeros, 0)
    *axes, groups = geometry
    stride, padding, dilation = (list(values) * (2 // len(values)) for values in axes)
    with _ENGINE_IN_USE:
        return quantized.conv2d_prepack(tensor, bias, stride, padding, dilation, groups)


class _EngineInUse:
    """The time in which any thread needs oneDNN's engine, which is a setting of the process."""

    def __init__(self) -> None:
        self._lock, self._users, self._before = Lock(), 0, ""

    def __enter__(self) -> None:
        with self._lock:
            if not self._users:
                self._before = torch.backends.quantized.engine
                torch.backends.quantized.engine = _ENGINE
            self._users += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._users -= 1
            if not self._users:
                torch.backends.quantized.engine = self._before


_ENGINE_IN_USE = _EngineInUse()


def with_engine(run: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that calls `run` with oneDNN's engine."""

    def run_with_engine(*args: Any) -> Any:
        with _ENGINE_IN_USE:
            return run(*args)

    return run_with_engine
