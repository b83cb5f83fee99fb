"""Run in a child process: integer kernels with the largest bytes, against whole numbers."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn import functional as F

from neural_mp.adaptors.common.kernel_products import largest_bytes
from neural_mp.adaptors.common.kernel_trials import say_found, say_starts, untried
from neural_mp.adaptors.pytorch.kernel_products import CONVOLUTIONS, PRODUCTS, Convolution

logger = logging.getLogger(__name__)

_FLOAT = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_NOTHING_BEHIND: tuple[Any, ...] = (1.0, 0, torch.float32, "none", [], "")


def main() -> None:
    """Say of every case whether its kernel is exact."""
    for case in untried((*CONVOLUTIONS, *PRODUCTS)):
        say_starts(case)
        try:
            if case in CONVOLUTIONS:
                exact = _exact_convolution(CONVOLUTIONS[case])
            else:
                exact = _exact_product(*PRODUCTS[case])
        except RuntimeError as error:
            logger.info("%s: %s", case, error)
            exact = True  # what is refused gives no wrong numbers
        if exact:
            say_found(case)


def _exact_convolution(tried: Convolution) -> bool:
    axes, groups = tried.axes, tried.groups
    shape = (2, tried.inputs, *[11] * axes)
    weight_shape = (tried.outputs, tried.inputs // groups, *[tried.window] * axes)
    x, weight = map(torch.from_numpy, largest_bytes(shape, weight_shape))
    if axes == 2:
        x = x.contiguous(memory_format=torch.channels_last)
    geometry = ([tried.stride] * axes, [0] * axes, [tried.dilation] * axes, groups)
    scales, zeros = _per_channel(tried.outputs)
    packed = torch.ops.onednn.qconv_prepack(weight, scales, 1.0, 0, *geometry, list(shape))
    found = torch.ops.onednn.qconv_pointwise.default(
        x, 1.0, 0, packed, scales, zeros, None, *geometry, *_NOTHING_BEHIND
    )
    return _same(found, _FLOAT[axes](x.double(), weight.double(), None, *geometry))


def _exact_product(rows: int, inputs: int, outputs: int) -> bool:
    x, weight = map(torch.from_numpy, largest_bytes((rows, inputs), (outputs, inputs)))
    scales, zeros = _per_channel(outputs)
    packed = torch.ops.onednn.qlinear_prepack(weight, list(x.shape))
    found = torch.ops.onednn.qlinear_pointwise.default(
        x, 1.0, 0, packed, scales, zeros, None, *_NOTHING_BEHIND
    )
    return _same(found, x.double() @ weight.double().T)


def _per_channel(outputs: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(outputs), torch.zeros(outputs, dtype=torch.long)


def _same(found: torch.Tensor, whole: torch.Tensor) -> bool:
    """Whether a result in float32 is that of whole numbers, as far as float32 tells them apart."""
    return bool(torch.allclose(found.double(), whole, rtol=2.0**-22, atol=0.5))


if __name__ == "__main__":
    with torch.no_grad():
        main()
