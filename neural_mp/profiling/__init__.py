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
    estimate_latency_ratio,
    estimate_uncontended_latency,
    make_concurrent_runs,
    measure_cpu_share,
    measure_memory_growth,
    read_other_cpu_seconds,
    time_interleaved_medians,
    time_interleaved_rounds,
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
    "estimate_latency_ratio",
    "estimate_uncontended_latency",
    "kernel_log",
    "make_concurrent_runs",
    "measure_cpu_share",
    "measure_memory_growth",
    "read_kernel_log",
    "read_other_cpu_seconds",
    "side_by_side",
    "time_interleaved_medians",
    "time_interleaved_rounds",
]
