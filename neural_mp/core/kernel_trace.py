"""Kernels that ran for an op, as reported by the runtime."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neural_mp.core.precision import Precision


@dataclass(frozen=True)
class OpTrace:
    """Kernels executed for one op, excluding input and output conversions.

    Attributes:
        kernels: the runtime's kernel names, in execution order; empty if the model's kernels of the
            op were not reached on these inputs.
        precision: compute precision: INT8 if any kernel is an integer kernel, else the first
            floating-point type read; None if none was read.
        reads_int8: whether any kernel read 8-bit values.
        rounded_to: 16-bit precision set for the op if the runtime lacks such a kernel: the op was
            computed in FP32 on rounded values.
        equals_float: whether an integer kernel of the op stands for the float op between quantized
            tensors: its results are equal, but for rounding.
    """

    kernels: tuple[str, ...]
    precision: Precision | None = None
    reads_int8: bool = False
    rounded_to: Precision | None = None
    equals_float: bool = False

    @property
    def was_executed(self) -> bool:
        """Whether any kernel of the op ran."""
        return bool(self.kernels)

    @property
    def effective_precision(self) -> Precision | None:
        """The compute precision; INT8 also for ops that only move 8-bit values."""
        if self.precision is None and self.reads_int8:
            return Precision.INT8
        return self.precision


#: Trace of an op without executed kernels.
NOT_REACHED = OpTrace(())


@dataclass(frozen=True)
class TracedKernel:
    """One executed kernel.

    Attributes:
        name: the runtime's kernel name.
        precision: INT8 for an integer kernel, else the first floating-point type read; None if none
            was read.
        reads_int8: whether the kernel read 8-bit values.
    """

    name: str
    precision: Precision | None = None
    reads_int8: bool = False


def build_op_trace(
    kernels: Sequence[TracedKernel], rounded_to: Precision | None = None, equals_float: bool = False
) -> OpTrace:
    """Return the trace of an op from its kernels in execution order."""
    precisions = [kernel.precision for kernel in kernels if kernel.precision is not None]
    return OpTrace(
        tuple(kernel.name for kernel in kernels),
        Precision.INT8 if Precision.INT8 in precisions else next(iter(precisions), None),
        any(kernel.reads_int8 for kernel in kernels),
        rounded_to,
        equals_float,
    )
