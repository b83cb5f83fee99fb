"""Accumulation of INT8 products in the kernels of a runtime, determined by running them.

CPU flags alone are not sufficient: a runtime may be configured to leave instructions unused, and
some kernels accumulate in 32 bits on every CPU. Therefore kernels run with the largest 8-bit
values, in a child process, and are compared with exact integer results.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.kernels.runtime_probe import probe_results, try_each
from neural_mp.adaptors.common.quant_params import Array
from neural_mp.core.hardware import HOST_TARGET, PORTABLE, Hardware
from neural_mp.core.int8_accumulation import EXACT_EVERYWHERE, Int8Accumulation, KernelKind

logger = logging.getLogger(__name__)

KernelAccumulation = Mapping[KernelKind, Int8Accumulation]
Shape = tuple[int, ...]
#: The types of inputs and weights, and their largest values.
_BYTES, _LARGEST = (np.uint8, np.int8), (255, 127)
#: Relative tolerance for float32 rounding.
_FLOAT32 = 2.0**-22

#: Target → oneDNN limits to probe under: none, or those of the CPUs on which the result must be
#: correct.
PROBED_LIMITS: Mapping[str, tuple[str | None, ...]] = {
    HOST_TARGET: (None,),
    "avx2": ("AVX2",),
    "avx512": ("AVX512_CORE",),
    PORTABLE: ("AVX2", "AVX512_CORE"),
}


def accumulation_on_target(
    hardware: Hardware, ask: Callable[[str | None], KernelAccumulation]
) -> KernelAccumulation:
    """Return the accumulation of every kind of kernel on the target machine.

    `ask` returns the accumulation of the runtime's kernels under a oneDNN limit. A kernel is exact
    if the runtime is exact under every limit and the CPU can be; kinds that accumulate in 32 bits
    on every CPU depend on the runtime only.
    """
    answers = [ask(limit) for limit in PROBED_LIMITS.get(hardware.target, ())]
    accumulation = {}
    for kernel in KernelKind:
        exact = all(answer[kernel] is Int8Accumulation.EXACT for answer in answers)
        if kernel not in EXACT_EVERYWHERE or not answers:
            exact = exact and hardware.int8_accumulation is Int8Accumulation.EXACT
        accumulation[kernel] = Int8Accumulation.EXACT if exact else Int8Accumulation.SATURATING
    return accumulation


def probe_int8_accumulation(
    hardware: Hardware,
    module: str,
    version: str,
    cases: Iterable[str],
    obeys_onednn_limit: bool = True,
) -> KernelAccumulation:
    """Return the accumulation of every kind of kernel, probed by a module.

    `version` covers the runtime and the probe; `obeys_onednn_limit` states whether the kernels obey
    oneDNN's limit.
    """
    return accumulation_on_target(
        hardware,
        lambda limit: accumulation_of_cases(
            probe_results(module, version, limit if obeys_onednn_limit else None), cases
        ),
    )


def accumulation_of_cases(results: Iterable[str], cases: Iterable[str]) -> KernelAccumulation:
    """Return the accumulation per kind of kernel: exact if all of its cases are in `results`.

    The name of a case is the kind of kernel, a space and a label.
    """
    failed = {case.split()[0] for case in set(cases).difference(results)}
    return {
        kind: Int8Accumulation.SATURATING if kind in failed else Int8Accumulation.EXACT
        for kind in KernelKind
    }


@dataclass(frozen=True)
class Convolution:
    """A convolution to probe: channels in and out, groups and geometry."""

    inputs: int
    outputs: int
    groups: int = 1
    window: int = 3
    axes: int = 2
    stride: int = 1
    dilation: int = 1

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Shapes of input [batch, channels, …] and weight [outputs, inputs, …]."""
        weight = (self.outputs, self.inputs // self.groups, *[self.window] * self.axes)
        return (2, self.inputs, *[11] * self.axes), weight


@dataclass(frozen=True)
class Dense:
    """A matrix product to probe."""

    rows: int
    inputs: int
    outputs: int

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Shapes of input [rows, inputs] and weight [outputs, inputs]."""
        return (self.rows, self.inputs), (self.outputs, self.inputs)


Case = Convolution | Dense
#: Kind of kernel and label → case for every runtime: few channels, 1×1 windows and groups have
#: kernels of their own.
COMMON_CASES: Mapping[str, Case] = {
    f"{KernelKind.CONVOLUTION} usual": Convolution(16, 16),
    f"{KernelKind.CONVOLUTION} pointwise": Convolution(64, 32, window=1),
    f"{KernelKind.CONVOLUTION} of images": Convolution(3, 16),
    f"{KernelKind.CONVOLUTION} in groups": Convolution(32, 32, groups=4),
    f"{KernelKind.CONVOLUTION} multiplying channels": Convolution(8, 16, groups=8),
    f"{KernelKind.DEPTHWISE} usual": Convolution(16, 16, groups=16),
    f"{KernelKind.DEPTHWISE} of few channels": Convolution(7, 7, groups=7),
    f"{KernelKind.DENSE} usual": Dense(4, 64, 32),
    f"{KernelKind.DENSE} of one row": Dense(1, 64, 10),
    f"{KernelKind.DENSE} large": Dense(128, 768, 256),
    f"{KernelKind.DENSE} odd": Dense(3, 17, 5),
}


def probe_accumulation(
    cases: Mapping[str, Case],
    multiply: Callable[[Case, Array, Array], Array],
    refusal: type[Exception],
) -> None:
    """Report every case with an exact kernel; runs in a child process.

    With the largest 8-bit values, kernels saturate if any sum of two products can.

    `multiply` runs a kernel on a case, with uint8 input and int8 weight, without padding, and
    returns the sums of products as floats; `refusal` is raised for a missing kernel.
    """

    def probe_case(name: str) -> Iterator[str]:
        case = cases[name]
        x, weight = (np.full(*of) for of in zip(case.shapes, _LARGEST, _BYTES, strict=True))
        # All results are equal, as all inputs and weights are.
        whole = math.prod((*_LARGEST, *weight.shape[1:]))
        try:
            sums = multiply(case, x, weight)
        except refusal:
            logger.info("the runtime rejects the probe %s", name, exc_info=True)
            yield name  # a missing kernel cannot saturate
            return
        if np.allclose(np.float64(sums), whole, rtol=_FLOAT32, atol=0.5):
            yield name

    try_each(cases, probe_case)
