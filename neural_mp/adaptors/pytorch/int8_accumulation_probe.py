"""Run in a child process: integer kernels at extreme values, compared with exact integers."""

from __future__ import annotations

from typing import Any

import torch

from neural_mp.adaptors.common.int8_accumulation import Case, Convolution, probe_accumulation
from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.pytorch.int8_accumulation import CASES
from neural_mp.adaptors.pytorch.versions import integer_convolution

onednn = torch.ops.onednn

_NO_EPILOGUE: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")


def _multiply(case: Case, x: Array, weight: Array) -> Array:
    """Return a kernel's accumulated products, with all scales set to 1."""
    stored, integers = torch.from_numpy(x), torch.from_numpy(weight)
    scales, zeros = torch.ones(len(weight)), torch.zeros(len(weight), dtype=torch.long)
    if isinstance(case, Convolution):
        if case.axes == 2:
            stored = stored.contiguous(memory_format=torch.channels_last)
        sides = ([case.stride], [0], [case.dilation])
        geometry = (*(side * case.axes for side in sides), case.groups)
        packed = onednn.qconv_prepack(integers, scales, 1.0, 0, *geometry, list(x.shape))
        kernel, shape = integer_convolution(case.axes), geometry
    else:
        packed = onednn.qlinear_prepack(integers, list(x.shape))
        kernel, shape = onednn.qlinear_pointwise.default, ()
    found = kernel(stored, 1.0, 0, packed, scales, zeros, None, *shape, *_NO_EPILOGUE)
    return found.numpy()


if __name__ == "__main__":
    with torch.no_grad():
        probe_accumulation(CASES, _multiply, RuntimeError)
