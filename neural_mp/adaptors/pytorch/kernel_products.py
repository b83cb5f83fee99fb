"""How oneDNN's integer kernels multiply bytes in the PyTorch that is installed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from neural_mp.adaptors.common.kernel_products import Products, from_facts
from neural_mp.adaptors.common.kernel_trials import facts, version_of
from neural_mp.core.byte_products import KernelKind

#: Raised when what is tried, or how, changes.
_VERSION = 1


@dataclass(frozen=True)
class Convolution:
    """A convolution to try: channels in and out, groups, and the rest of its geometry."""

    inputs: int
    outputs: int
    groups: int = 1
    window: int = 3
    axes: int = 2
    stride: int = 1
    dilation: int = 1


#: Kind of kernel and a word → what is tried; oneDNN has other kernels for few channels, for one
#: position of the window, and for groups.
CONVOLUTIONS: Mapping[str, Convolution] = {
    f"{KernelKind.CONVOLUTION} usual": Convolution(16, 16),
    f"{KernelKind.CONVOLUTION} pointwise": Convolution(64, 32, window=1),
    f"{KernelKind.CONVOLUTION} of images": Convolution(3, 16),
    f"{KernelKind.CONVOLUTION} of one channel": Convolution(1, 16, window=5),
    f"{KernelKind.CONVOLUTION} in groups": Convolution(32, 32, groups=4),
    f"{KernelKind.CONVOLUTION} in small groups": Convolution(6, 6, groups=2),
    f"{KernelKind.CONVOLUTION} multiplying channels": Convolution(8, 16, groups=8),
    f"{KernelKind.CONVOLUTION} of lines": Convolution(16, 16, axes=1),
    f"{KernelKind.CONVOLUTION} of volumes": Convolution(16, 16, axes=3),
    f"{KernelKind.DEPTHWISE} usual": Convolution(16, 16, groups=16),
    f"{KernelKind.DEPTHWISE} strided": Convolution(64, 64, groups=64, window=5, stride=2),
    f"{KernelKind.DEPTHWISE} dilated": Convolution(32, 32, groups=32, dilation=2),
    f"{KernelKind.DEPTHWISE} of few channels": Convolution(7, 7, groups=7),
    f"{KernelKind.DEPTHWISE} of lines": Convolution(16, 16, groups=16, axes=1),
}
#: Kind of kernel and a word → rows, inputs, outputs.
PRODUCTS: Mapping[str, tuple[int, int, int]] = {
    f"{KernelKind.DENSE} usual": (4, 64, 32),
    f"{KernelKind.DENSE} of one row": (1, 64, 10),
    f"{KernelKind.DENSE} large": (128, 768, 256),
    f"{KernelKind.DENSE} odd": (3, 17, 5),
}


@lru_cache(maxsize=8)
def kernel_products(onednn_limit: str | None = None) -> Products:
    """How each kind of kernel multiplies, here or under a limit of oneDNN's."""
    module = "neural_mp.adaptors.pytorch.kernel_products_run"
    found = facts(module, f"{_VERSION} {version_of('torch')}", onednn_limit)
    return from_facts(found, (*CONVOLUTIONS, *PRODUCTS))
