"""Measurements of torch's kernels on this processor, each made once per process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from neural_mp.adaptors.pytorch import quantizable_ops as layers
from neural_mp.adaptors.pytorch.versions import integer_convolution

onednn = torch.ops.onednn

#: Runs of each variant, interleaved; the fastest counts.
_RUNS = 5
#: Time over that of a float32 output above which an output dtype has no kernel of its own. The
#: reference implementations take 7 to 500 times as long, other kernels the same time.
_MAX_SLOWDOWN_RATIO = 3
#: Channels, features and rows of the layers that are measured.
_SIZE = 64


@cache
def multiplies_bfloat16_fast() -> bool:
    """Whether products in bfloat16 take less time than in float32.

    The difference is severalfold either way: without instructions for them, products are emulated.
    """
    x = torch.ones(4, 128, 64)

    def product(dtype: torch.dtype) -> Callable[[], Any]:
        left = x.to(dtype)
        return lambda: torch.bmm(left, left.transpose(1, 2))

    float32, bfloat16 = _fastest_runs(product(torch.float32), product(torch.bfloat16))
    return bfloat16 < float32


@cache
def writes_fast(layer: Any, dtype: torch.dtype) -> bool:
    """Whether the integer kernel of a layer writes results in `dtype` as fast as in float32.

    oneDNN has a reference implementation where it has no kernel: for bfloat16 without AVX-512, and
    for float16 in dense layers. Convolutions in float16 are refused.

    Args:
        layer: the op, such as `aten.linear.default`.
        dtype: a 16-bit float dtype.
    """
    run = _dense_layer if layer is layers.LINEAR else _convolution
    try:
        float32, other = _fastest_runs(lambda: run(torch.float32), lambda: run(dtype))
    except RuntimeError:
        return False
    return other < float32 * _MAX_SLOWDOWN_RATIO


def _fastest_runs(*runs: Callable[[], Any]) -> list[float]:
    """Return the seconds of the fastest run of each call."""
    seconds = [math.inf] * len(runs)
    with torch.no_grad():
        for _ in range(_RUNS):
            for index, run in enumerate(runs):
                started = time.perf_counter()
                run()
                seconds[index] = min(seconds[index], time.perf_counter() - started)
    return seconds


def _dense_layer(dtype: torch.dtype) -> torch.Tensor:
    x = torch.ones(_SIZE, _SIZE, dtype=torch.uint8)
    packed = onednn.qlinear_prepack(x.to(torch.int8), list(x.shape))
    before = (x, 1.0, 0, packed, *_weight_parameters(), None)
    return onednn.qlinear_pointwise.default(*before, 1.0, 0, dtype, "none", [], "")


def _convolution(dtype: torch.dtype) -> torch.Tensor:
    x = torch.ones(1, _SIZE, 8, 8, dtype=torch.uint8).to(memory_format=torch.channels_last)
    weight = torch.ones(_SIZE, _SIZE, 1, 1, dtype=torch.int8)
    scales, zero_points = _weight_parameters()
    geometry = ([1, 1], [0, 0], [1, 1], 1)
    packed = onednn.qconv_prepack(weight, scales, 1.0, 0, *geometry, list(x.shape))
    before = (x, 1.0, 0, packed, scales, zero_points, None, *geometry)
    return integer_convolution(2)(*before, 1.0, 0, dtype, "none", [], "")


def _weight_parameters() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(_SIZE), torch.zeros(_SIZE, dtype=torch.long)
