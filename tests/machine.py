"""The machine at hand, as far as tests may say something of it: what is there, and no more."""

from __future__ import annotations

import os

from neural_mp.adaptors.common.kernels.runtime_probe import ONEDNN_LIMIT
from neural_mp.adaptors.registry import probe_installed_accumulation
from neural_mp.core.int8_accumulation import (
    FULL_RANGE,
    REDUCED_RANGE,
    WEIGHT_LIMITS,
    Int8Accumulation,
    KernelKind,
)
from neural_mp.core.precision import Precision
from neural_mp.testing.fixtures import INTEGER_FLAGS, machine

__all__ = [
    "CONVOLUTION",
    "DENSE",
    "DEPTHWISE",
    "INTEGER_FLAGS",
    "examples",
    "has_rewrite_pass",
    "machine",
    "products_here",
    "weight_limit_here",
]

CONVOLUTION, DEPTHWISE, DENSE = KernelKind.CONVOLUTION, KernelKind.DEPTHWISE, KernelKind.DENSE


def examples(count: int) -> int:
    """How many examples to draw; a fourth where this processor stands in for another one."""
    return max(8, count // 4) if ONEDNN_LIMIT in os.environ else count


def products_here(framework: str, kernel: KernelKind) -> Int8Accumulation:
    """How the runtime of a framework multiplies bytes here, by its own account."""
    return probe_installed_accumulation(machine())[framework][kernel]


def weight_limit_here(framework: str, kernel: KernelKind) -> int:
    """The largest integer of a weight that the runtime is right with here: 127 or 63."""
    exact = products_here(framework, kernel) is Int8Accumulation.EXACT
    return WEIGHT_LIMITS[FULL_RANGE if exact else REDUCED_RANGE]


def has_rewrite_pass() -> bool:
    """Whether TensorFlow's own pass for BF16 works here; without AVX-512 it does nothing."""
    from neural_mp.adaptors.tensorflow.amp_pass import read_runtime_lists
    from neural_mp.adaptors.tensorflow.int8_accumulation import find_bf16_obstacle

    return find_bf16_obstacle() is None and read_runtime_lists(Precision.BF16) is not None
