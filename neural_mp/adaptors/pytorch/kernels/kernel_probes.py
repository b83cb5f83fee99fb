"""Measurements of torch's kernels on this processor, each made once per process."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from neural_mp.adaptors.pytorch.graph import quantizable_ops as layers
from neural_mp.adaptors.pytorch.versions import find_integer_convolution

onednn = torch.ops.onednn

#: Runs of each variant, interleaved, and seconds after which two runs are enough.
_RUNS, _SECONDS = 7, 0.1
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

    def build_product(dtype: torch.dtype) -> Callable[[], Any]:
        matrix = x.to(dtype)
        return lambda: torch.bmm(matrix, matrix.transpose(1, 2))

    with torch.no_grad():
        float32, bfloat16 = time_fastest_runs(
            [build_product(torch.float32), build_product(torch.bfloat16)]
        )
    return bfloat16 < float32


@cache
def writes_fast(layer: torch._ops.OpOverload, dtype: torch.dtype) -> bool:
    """Whether the integer kernel of a layer writes results in `dtype` as fast as in float32.

    oneDNN has a reference implementation where it has no kernel: for bfloat16 without AVX-512, and
    for float16 in dense layers. Convolutions in float16 are refused. Dense layers of torch 2.6
    write bytes instead of float16.

    Args:
        layer: the op, such as `aten.linear.default`.
        dtype: a 16-bit float dtype.
    """
    weight, geometry = torch.ones(_SIZE, _SIZE, dtype=torch.int8), tuple[Any, ...]()
    x = torch.ones(_SIZE, _SIZE, dtype=torch.uint8)
    if layer is not layers.LINEAR:
        x = x.view(1, _SIZE, 8, 8).to(memory_format=torch.channels_last)
        weight, geometry = weight[..., None, None], ([1, 1], [0, 0], [1, 1], 1)
    try:
        with torch.no_grad():
            run = make_unscaled_kernel(x, weight, geometry)
            if run(dtype).dtype is not dtype:
                return False
            float32, half = time_fastest_runs([lambda: run(torch.float32), lambda: run(dtype)])
    except RuntimeError:
        return False
    return half < float32 * _MAX_SLOWDOWN_RATIO


def make_unscaled_kernel(
    x: torch.Tensor, weight: torch.Tensor, geometry: tuple[Any, ...] = ()
) -> Callable[[torch.dtype], torch.Tensor]:
    """Return an integer kernel without bias, with all scales 1, as a function of the output dtype.

    Args:
        x: uint8 inputs.
        weight: int8, outputs first.
        geometry: stride, padding, dilation and groups of a convolution; empty for a dense layer.
    """
    scales, zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.long)
    if geometry:
        packed = onednn.qconv_prepack(weight, scales, 1.0, 0, *geometry, list(x.shape))
        kernel = find_integer_convolution(len(geometry[0]))
    else:
        packed = onednn.qlinear_prepack(weight, list(x.shape))
        kernel = onednn.qlinear_pointwise.default
    operands = (x, 1.0, 0, packed, scales, zeros, None, *geometry, 1.0, 0)
    return lambda dtype: kernel(*operands, dtype, "none", [], "")


def time_fastest_runs(variants: Sequence[Callable[[], object]]) -> list[float]:
    """Return the seconds of the fastest run of each variant, after one that warms up."""
    seconds = [math.inf] * len(variants)
    begun = time.perf_counter()
    for number in range(1 + _RUNS):
        for index, run in enumerate(variants):
            started = time.perf_counter()
            run()
            elapsed = time.perf_counter() - started
            seconds[index] = min(seconds[index], elapsed) if number else math.inf
        if number > 1 and time.perf_counter() - begun > _SECONDS:
            break
    return seconds
