"""How the integer kernels of the ONNX Runtime that is installed multiply bytes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from neural_mp.adaptors.common.kernel_products import Products, from_facts
from neural_mp.adaptors.common.kernel_trials import facts, version_of
from neural_mp.core.byte_products import KernelKind

#: Raised when what is tried, or how, changes.
_VERSION = 1
#: Kind of kernel and a word → channels in, channels out, groups, length of the window's sides.
CONVOLUTIONS: Mapping[str, tuple[int, int, int, int]] = {
    f"{KernelKind.CONVOLUTION} usual": (16, 16, 1, 3),
    f"{KernelKind.CONVOLUTION} pointwise": (64, 32, 1, 1),
    f"{KernelKind.CONVOLUTION} of images": (3, 16, 1, 3),
    f"{KernelKind.CONVOLUTION} in groups": (32, 32, 4, 3),
    f"{KernelKind.CONVOLUTION} multiplying channels": (8, 16, 8, 3),
    f"{KernelKind.DEPTHWISE} usual": (16, 16, 16, 3),
    f"{KernelKind.DEPTHWISE} wide": (64, 64, 64, 5),
    f"{KernelKind.DEPTHWISE} of few channels": (7, 7, 7, 3),
}
#: Kind of kernel and a word → rows, inputs, outputs.
PRODUCTS: Mapping[str, tuple[int, int, int]] = {
    f"{KernelKind.DENSE} usual": (4, 64, 32),
    f"{KernelKind.DENSE} of one row": (1, 64, 10),
    f"{KernelKind.DENSE} large": (128, 768, 256),
    f"{KernelKind.DENSE} odd": (3, 17, 5),
}


@lru_cache(maxsize=1)
def _here() -> Products:
    module = "neural_mp.adaptors.onnxrt.kernel_products_run"
    version = version_of("onnxruntime", "onnxruntime-gpu", "onnxruntime-openvino")
    found = facts(module, f"{_VERSION} {version}")
    return from_facts(found, (*CONVOLUTIONS, *PRODUCTS))


def kernel_products(onednn_limit: str | None = None) -> Products:
    """How each kind of kernel multiplies here; they are not oneDNN's, and mind no limit of its."""
    return _here()
