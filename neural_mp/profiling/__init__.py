"""Measurement of models, ops and kernels."""

from neural_mp.profiling.kernel_log import kernel_log, read_kernel_log
from neural_mp.profiling.kernel_records import (
    KernelCall,
    KernelChange,
    KernelKey,
    KernelLog,
    KernelRow,
    RowPair,
    changed_kernels,
    side_by_side,
)
from neural_mp.profiling.measurement import (
    CALLS_PER_CALLER,
    Ratio,
    bound_ratio,
    concurrent_runs,
    cpu_share,
    interleaved_medians,
    interleaved_rounds,
    latency_ratio,
    memory_growth,
    uncontended_latency,
)

__all__ = [
    "CALLS_PER_CALLER",
    "KernelCall",
    "KernelChange",
    "KernelKey",
    "KernelLog",
    "KernelRow",
    "Ratio",
    "RowPair",
    "bound_ratio",
    "changed_kernels",
    "concurrent_runs",
    "cpu_share",
    "interleaved_medians",
    "interleaved_rounds",
    "kernel_log",
    "latency_ratio",
    "memory_growth",
    "read_kernel_log",
    "side_by_side",
    "uncontended_latency",
]
