"""INT8 accumulation of XNNPACK's integer kernels."""

from __future__ import annotations

from neural_mp.adaptors.common.kernels.int8_accumulation import KernelAccumulation
from neural_mp.core.hardware import Hardware
from neural_mp.core.int8_accumulation import Int8Accumulation, KernelKind


def int8_accumulation(hardware: Hardware) -> KernelAccumulation:
    """Return the accumulation of each kind of kernel: exact on every CPU.

    Without VNNI, kernels for x86 extend both factors to 16 bits and add products in 32 bits
    (`vpmaddwd`; XNNPACK, `src/qs8-gemm/MRx4c8-avx2.c.in`).
    """
    return dict.fromkeys(KernelKind, Int8Accumulation.EXACT)
