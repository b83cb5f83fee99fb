"""The machine at hand, as far as tests may say something of it: what is there, and no more."""

from __future__ import annotations

from neural_mp.adaptors.registry import installed_products
from neural_mp.core.byte_products import (
    FULL_RANGE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    ByteProducts,
    KernelKind,
)
from neural_mp.core.hardware import NATIVE_FLAGS, Hardware, detect
from neural_mp.core.precision import Precision

CONVOLUTION, DEPTHWISE, DENSE = KernelKind.CONVOLUTION, KernelKind.DEPTHWISE, KernelKind.DENSE
#: The flags of this CPU that decide on INT8, and on nothing else.
INTEGER_FLAGS = detect({}).flags & frozenset(NATIVE_FLAGS[Precision.INT8])


def machine(*forced: Precision) -> Hardware:
    """This machine without its 16-bit instructions, and with what is forced on."""
    return Hardware("this machine", INTEGER_FLAGS, 2, forced=frozenset(forced))


def products_here(framework: str, kernel: KernelKind) -> ByteProducts:
    """How the runtime of a framework multiplies bytes here, by its own account."""
    return installed_products(machine())[framework][kernel]


def weight_limit_here(framework: str, kernel: KernelKind) -> int:
    """The largest integer of a weight that the runtime is right with here: 127 or 63."""
    exact = products_here(framework, kernel) is ByteProducts.EXACT
    return WEIGHT_LIMITS[FULL_RANGE if exact else REDUCED_RANGE]


def has_rewrite_pass() -> bool:
    """Whether TensorFlow's own pass for BF16 works here; without AVX-512 it does nothing."""
    from neural_mp.adaptors.tensorflow.kernel_products import bf16_obstacle
    from neural_mp.adaptors.tensorflow.runtime_lists import runtime_lists

    return bf16_obstacle() is None and runtime_lists(Precision.BF16) is not None
