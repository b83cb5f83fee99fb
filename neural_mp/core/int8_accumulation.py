"""How a processor multiplies bytes, and what range of weights that leaves."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.core.enums import Granularity, QuantDType, Scheme, WeightRange
from neural_mp.core.precision import QuantSpec
from neural_mp.util.string_enum import StringEnum


class Int8Accumulation(StringEnum):
    """What becomes of the sum of two products of an unsigned and a signed byte.

    EXACT: it is added up in 32 bits (VNNI, AVX-VNNI, AMX, ARM, CUDA).
    SATURATING: it is cut off at 16 bits. x86 without these instructions adds two products up with
    `vpmaddubsw`, whose largest result is 32767 (Intel 64 and IA-32 Architectures Software
    Developer's Manual, "PMADDUBSW"); the sum may be 2 · 255 · 127 = 64770.
    """

    EXACT = "exact"
    SATURATING = "saturating"

    @property
    def in_words(self) -> str:
        """The fact, with what follows from it."""
        if self is Int8Accumulation.EXACT:
            return "products of bytes are exact"
        return (
            f"sums of two products of bytes saturate at 16 bits, so INT8 weights stay within "
            f"±{WEIGHT_LIMITS[REDUCED_RANGE]}"
        )


class KernelKind(StringEnum):
    """The kinds of integer kernel that may multiply in different ways."""

    CONVOLUTION = "convolution"  #: in one group or several
    DEPTHWISE = "depthwise"  #: a convolution of one input and one output channel a group
    DENSE = "dense"


#: The kinds that add up in 32 bits on every processor.
EXACT_EVERYWHERE = frozenset({KernelKind.DEPTHWISE})
FULL_RANGE, REDUCED_RANGE = WeightRange.FULL, WeightRange.REDUCED
#: Range of a weight → the largest magnitude that is stored. 2 · 255 · 63 is less than 2¹⁵, so that
#: no sum of two products saturates.
WEIGHT_LIMITS: Mapping[WeightRange, int] = {FULL_RANGE: 127, REDUCED_RANGE: 63}
_RANGES = {Int8Accumulation.EXACT: FULL_RANGE, Int8Accumulation.SATURATING: REDUCED_RANGE}


def weight_quant_spec(products: Int8Accumulation) -> QuantSpec:
    """How the weights of a kernel are stored: in the widest range that its products leave right."""
    return QuantSpec(
        QuantDType.INT8, Scheme.SYMMETRIC, Granularity.PER_CHANNEL, range=_RANGES[products]
    )


#: What a plan may always say of a weight: a reduced range is right for every kernel.
REDUCED_WEIGHT = weight_quant_spec(Int8Accumulation.SATURATING)


def weight_qmax(spec: QuantSpec | None) -> int:
    """The largest magnitude of a weight that is stored so; without a spec, in the full range."""
    return WEIGHT_LIMITS[spec.range if spec is not None else FULL_RANGE]
