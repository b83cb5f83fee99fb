"""How the integer kernels of a runtime multiply bytes, asked of the runtime.

CPU flags alone do not tell: a runtime may have been told to leave instructions unused, and some of
its kernels add up in 32 bits on every processor. So kernels are run with the largest bytes there
are, in a child process, and compared with whole numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import numpy as np

from neural_mp.adaptors.common.integer_encoding import Array
from neural_mp.core.byte_products import EXACT_EVERYWHERE, ByteProducts, KernelKind
from neural_mp.core.hardware import PORTABLE, THIS, Hardware

Products = Mapping[KernelKind, ByteProducts]

#: What is converted for → the limits that oneDNN is asked under: none, or those of the processors
#: that the result has to be right on.
ASKED_UNDER: Mapping[str, tuple[str | None, ...]] = {
    THIS: (None,),
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
        exact = all(answer[kernel] is ByteProducts.EXACT for answer in answers)
        if kernel not in EXACT_EVERYWHERE or not answers:
            exact = exact and hardware.byte_products is ByteProducts.EXACT
        found[kernel] = ByteProducts.EXACT if exact else ByteProducts.SATURATING
    return found


def from_facts(facts: Iterable[str], cases: Iterable[str]) -> Products:
    """A kind of kernel is exact if it was so in all of its cases.

    Args:
        facts: the cases that were exact.
        cases: all cases: the kind of kernel, a space, what tells it from others of the kind.
    """
    exact = frozenset(facts)
    kinds: dict[KernelKind, bool] = dict.fromkeys(KernelKind, True)
    for case in cases:
        kind = KernelKind(case.split()[0])
        kinds[kind] = kinds[kind] and case in exact
    return {
        kind: ByteProducts.EXACT if right else ByteProducts.SATURATING
        for kind, right in kinds.items()
    }


def largest_bytes(shape: tuple[int, ...], weight_shape: tuple[int, ...]) -> tuple[Array, Array]:
    """Inputs of 255 and weights of 127: if any sum of two products saturates, these do."""
    return np.full(shape, 255, np.uint8), np.full(weight_shape, 127, np.int8)
