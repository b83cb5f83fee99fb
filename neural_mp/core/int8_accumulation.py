"""INT8 accumulation modes of processors, and the weight ranges that keep results exact."""

from __future__ import annotations

from collections.abc import Mapping

from neural_mp.core.enums import Granularity, QuantDType, Scheme, WeightRange
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.util.string_enum import StringEnum


class Int8Accumulation(StringEnum):
    """Accumulation of the products of unsigned and signed 8-bit integers.

    EXACT: in 32 bits (VNNI, AVX-VNNI, AMX, ARM, CUDA).
    SATURATING: pairs saturate at 16 bits. x86 without these instructions adds two products with
    `vpmaddubsw`, whose largest result is 32767 (Intel 64 and IA-32 Architectures Software
    Developer's Manual, "PMADDUBSW"); the sum may be 2 · 255 · 127 = 64770.
    """

    EXACT = "exact"
    SATURATING = "saturating"

    @property
    def in_words(self) -> str:
        """The mode as text, with its consequence."""
        if self is Int8Accumulation.EXACT:
            return "INT8 accumulation is exact"
        return (
            f"INT8 accumulation saturates at 16 bits, so INT8 weights are limited to "
            f"±{WEIGHT_LIMITS[REDUCED_RANGE]}"
        )


class KernelKind(StringEnum):
    """Kinds of integer kernels that may accumulate differently."""

    CONVOLUTION = "convolution"  #: grouped or not
    DEPTHWISE = "depthwise"  #: one input and one output channel per group
    DENSE = "dense"


#: Kinds with exact accumulation on every processor.
EXACT_EVERYWHERE = frozenset({KernelKind.DEPTHWISE})
FULL_RANGE, REDUCED_RANGE = WeightRange.FULL, WeightRange.REDUCED
#: Weight range → largest quantized magnitude. 2 · 255 · 63 < 2¹⁵, so sums of two products never
#: saturate.
WEIGHT_LIMITS: Mapping[WeightRange, int] = {FULL_RANGE: 127, REDUCED_RANGE: 63}
_RANGES = {Int8Accumulation.EXACT: FULL_RANGE, Int8Accumulation.SATURATING: REDUCED_RANGE}


def weight_quant_spec(accumulation: Int8Accumulation) -> QuantSpec:
    """Return the quantization of a kernel's weights: the widest range with exact results."""
    return QuantSpec(
        QuantDType.INT8, Scheme.SYMMETRIC, Granularity.PER_CHANNEL, range=_RANGES[accumulation]
    )


#: Valid for the weights of every kernel: a reduced range stays exact.
REDUCED_WEIGHT = weight_quant_spec(Int8Accumulation.SATURATING)


def weight_qmax(spec: QuantSpec | None) -> int:
    """Return the largest quantized magnitude of a weight; without a spec, of the full range."""
    return WEIGHT_LIMITS[spec.range if spec is not None else FULL_RANGE]
