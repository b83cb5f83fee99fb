"""How the integer kernels of a runtime multiply bytes, asked of the runtime.

CPU flags alone do not tell: a runtime may have been told to leave instructions unused, and some of
its kernels add up in 32 bits on every processor. So kernels are run with the largest bytes there
are, in a child process, and compared with whole numbers.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from neural_mp.adaptors.common.quant_params import Array
from neural_mp.adaptors.common.runtime_probe import probe_results, try_each
from neural_mp.core.hardware import HOST_TARGET, PORTABLE, Hardware
from neural_mp.core.int8_accumulation import EXACT_EVERYWHERE, Int8Accumulation, KernelKind

logger = logging.getLogger(__name__)

Products = Mapping[KernelKind, Int8Accumulation]
Shape = tuple[int, ...]
#: The types of inputs and weights, and the largest numbers in them.
_BYTES, _LARGEST = (np.uint8, np.int8), (255, 127)
#: The share of a number up to which float32 does not tell it from another.
_FLOAT32 = 2.0**-22

#: What is converted for → the limits that oneDNN is asked under: none, or those of the processors
#: that the result has to be right on.
ASKED_UNDER: Mapping[str, tuple[str | None, ...]] = {
    HOST_TARGET: (None,),
    "avx2": ("AVX2",),
    "avx512": ("AVX512_CORE",),
    PORTABLE: ("AVX2", "AVX512_CORE"),
}


def products_for(hardware: Hardware, ask: Callable[[str | None], Products]) -> Products:
    """How the kernels multiply bytes on the machine that is converted for.

    A kernel is exact where the runtime says so and the processor can be; one that adds up in 32
    bits on every processor, where the runtime says so.

    Args:
        hardware: the machine that is converted for.
        ask: limit of oneDNN → how the kernels of the runtime multiply under it.
    """
    answers = [ask(limit) for limit in ASKED_UNDER.get(hardware.target, ())]
    found = {}
    for kernel in KernelKind:
        exact = all(answer[kernel] is Int8Accumulation.EXACT for answer in answers)
        if kernel not in EXACT_EVERYWHERE or not answers:
            exact = exact and hardware.byte_products is Int8Accumulation.EXACT
        found[kernel] = Int8Accumulation.EXACT if exact else Int8Accumulation.SATURATING
    return found


def tried_products(
    hardware: Hardware, module: str, version: str, cases: Iterable[str], minds_onednn: bool = True
) -> Products:
    """How the kernels multiply bytes, found by a module that runs `try_products` on these cases.

    Args:
        hardware: the machine that is converted for.
        module: what is run as a child process.
        version: that of the runtime, and of what is tried.
        cases: the names of the cases.
        minds_onednn: whether the kernels are oneDNN's, and mind a limit of its.
    """

    def asked_under(onednn_limit: str | None) -> Products:
        return from_facts(
            probe_results(module, version, onednn_limit if minds_onednn else None), cases
        )

    return products_for(hardware, asked_under)


def from_facts(found: Iterable[str], cases: Iterable[str]) -> Products:
    """A kind of kernel is exact if it was so in all of its cases.

    Args:
        found: the cases that were exact.
        cases: all cases: the kind of kernel, a space, what tells it from others of the kind.
    """
    exact = frozenset(found)
    kinds: dict[KernelKind, bool] = dict.fromkeys(KernelKind, True)
    for case in cases:
        kind = KernelKind(case.split()[0])
        kinds[kind] = kinds[kind] and case in exact
    return {
        kind: Int8Accumulation.EXACT if right else Int8Accumulation.SATURATING
        for kind, right in kinds.items()
    }


@dataclass(frozen=True)
class Convolution:
    """A convolution to try: channels in and out, groups, and the rest of its geometry."""

    inputs: int
    outputs: int
    groups: int = 1
    window: int = 3
    axes: int = 2
    stride: int = 1
    dilation: int = 1

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of the input, [batch, channels, …], and of the weight, [outputs, inputs, …]."""
        window = (self.window,) * self.axes
        return (2, self.inputs, *[11] * self.axes), (
            self.outputs,
            self.inputs // self.groups,
            *window,
        )


@dataclass(frozen=True)
class Dense:
    """A product of matrices to try."""

    rows: int
    inputs: int
    outputs: int

    @property
    def shapes(self) -> tuple[Shape, Shape]:
        """Of the input, [rows, inputs], and of the weight, [outputs, inputs]."""
        return (self.rows, self.inputs), (self.outputs, self.inputs)


Case = Convolution | Dense
#: Kind of kernel and a word → what is tried in every runtime: there are other kernels for few
#: channels, for one position of the window, and for groups.
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


def try_products(
    cases: Mapping[str, Case],
    multiply: Callable[[Case, Array, Array], Array],
    refusal: type[Exception],
) -> None:
    """In a child: say of every case whether its kernel is exact.

    The bytes are the largest there are: if any sum of two products saturates, theirs do.

    Args:
        cases: kind of kernel and a word → what is tried.
        multiply: runs a kernel on a case, its input in uint8 and its weight in int8, without
            padding, and gives the sums of products as real numbers.
        refusal: what is raised where the runtime has no such kernel.
    """

    def exact(name: str) -> Iterator[str]:
        case = cases[name]
        x, weight = (np.full(*of) for of in zip(case.shapes, _LARGEST, _BYTES, strict=True))
        # All results are alike: each holds the sum of the products of all that an output reads.
        whole = math.prod((*_LARGEST, *weight.shape[1:]))
        try:
            found = multiply(case, x, weight)
        except refusal:
            logger.info("%s is refused", name, exc_info=True)
            yield name  # what is refused gives no wrong numbers
            return
        if np.allclose(np.float64(found), whole, rtol=_FLOAT32, atol=0.5):
            yield name

    try_each(cases, exact)
