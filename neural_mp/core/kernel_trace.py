"""What ran for an op, by the account of the runtime itself."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from neural_mp.core.precision import Precision


@dataclass(frozen=True)
class OpTrace:
    """The kernels that ran for one op, conversions of what it reads and writes left out.

    Attributes:
        kernels: what the runtime calls them, in the order in which they ran; none where the model
            has kernels of the op, and did not come to them on these inputs.
        precision: what they computed in: INT8 where one of them is an integer kernel, else the
            floating-point type that was read first; None where they read no such numbers.
        reads_int8: whether one of them read numbers of 8 bits.
        rounded_to: the 16-bit precision that the op was told to run in where the runtime has no
            such kernel of it: it computed in FP32, on numbers that are rounded.
    """

    kernels: tuple[str, ...]
    precision: Precision | None = None
    reads_int8: bool = False
    rounded_to: Precision | None = None

    @property
    def executed(self) -> bool:
        """Whether the run came to the op at all."""
        return bool(self.kernels)

    @property
    def effective_precision(self) -> Precision | None:
        """What it ran in, in a word; INT8 also of what only moves numbers of 8 bits."""
        if self.precision is None and self.reads_int8:
            return Precision.INT8
        return self.precision


#: Of an op that the run did not come to.
NOT_REACHED = OpTrace(())


@dataclass(frozen=True)
class TracedKernel:
    """One kernel that ran.

    Attributes:
        name: what the runtime calls it.
        precision: INT8 for an integer kernel, else the floating-point type of what it read first;
            None where it read none.
        reads_int8: whether it read numbers of 8 bits.
    """

    name: str
    precision: Precision | None = None
    reads_int8: bool = False


def op_trace(kernels: Sequence[TracedKernel], rounded_to: Precision | None = None) -> OpTrace:
    """What ran for an op, from its kernels in order."""
    found = [kernel.precision for kernel in kernels if kernel.precision is not None]
    return OpTrace(
        tuple(kernel.name for kernel in kernels),
        Precision.INT8 if Precision.INT8 in found else next(iter(found), None),
        any(kernel.reads_int8 for kernel in kernels),
        rounded_to,
    )
