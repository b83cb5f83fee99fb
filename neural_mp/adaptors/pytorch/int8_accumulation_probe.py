"""Run in a child process: integer kernels at extreme values, compared with exact integers."""

from __future__ import annotations

from typing import Any

import torch

from neural_mp.adaptors.common.kernels.int8_accumulation import (
    Case,
    Convolution,
    probe_accumulation,
)
from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.pytorch.int8_accumulation import CASES
from neural_mp.adaptors.pytorch.kernels.kernel_probes import make_unscaled_kernel


def _run_unscaled_kernel(case: Case, x: Array, weight: Array) -> Array:
    stored, geometry = torch.from_numpy(x), tuple[Any, ...]()
    if isinstance(case, Convolution):
        if case.axes == 2:
            stored = stored.contiguous(memory_format=torch.channels_last)
        sides = ([case.stride], [0], [case.dilation])
        geometry = (*(side * case.axes for side in sides), case.groups)
    run = make_unscaled_kernel(stored, torch.from_numpy(weight), geometry)
    return run(torch.float32).numpy()


if __name__ == "__main__":
    with torch.no_grad():
        probe_accumulation(CASES, _run_unscaled_kernel, RuntimeError)
