"""Measurement of models, ops and kernels."""

from neural_mp.profiling.concurrency import CALLS_PER_CALLER, concurrent_runs
from neural_mp.profiling.kernel_log import kernel_log, read_kernel_log
from neural_mp.profiling.kernel_log_diff import (
    KernelChange,
    RowPair,
    changed_kernels,
    side_by_side,
)
from neural_mp.profiling.kernel_records import KernelCall, KernelKey, KernelLog, KernelRow
from neural_mp.profiling.measurement import (
    Ratio,
    bound_ratio,
    interleaved_medians,
    interleaved_rounds,
    memory_growth,
    peak_growth,
    ratio,
    uncontended,
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
    "interleaved_medians",
    "interleaved_rounds",
    "kernel_log",
    "memory_growth",
    "peak_growth",
    "ratio",
    "read_kernel_log",
    "side_by_side",
    "uncontended",
]
