"""Capabilities of ops, with reasons, from the kernels of a framework and the hardware."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from neural_mp.core.enums import (
    CalibrationAlgorithm,
    Granularity,
    QuantDType,
    Scheme,
    WeightCorrection,
)
from neural_mp.core.hardware import Support
from neural_mp.core.int8_accumulation import Int8Accumulation, weight_quant_spec
from neural_mp.core.precision import FP32, LOW_BITS, OpConfig, Precision, make_weight_only
from neural_mp.core.quant_spec import QuantSpec
from neural_mp.space import Capability
from neural_mp.util.pytree import Array

#: Reasons for a missing kernel, worded alike for all frameworks.
NO_INTEGER_KERNEL = "no integer kernel"
NO_LOW_BIT_KERNEL = "no kernel for weights below 8 bits"
BOTH_FACTORS_COMPUTED = "both factors are computed; no integer kernel"
COMPUTED_WEIGHT = "its weight is computed, not constant"
UNUSABLE_WEIGHT = "its weight is empty, or holds NaN or Inf"
CONSTANT_INPUT = "its input is constant, not computed"
TRANSPOSED_INPUT = "its input is transposed; the integer kernel requires an untransposed input"
FUSED = "fused into the INT8 kernel of the preceding layer"
AGNOSTIC = "quantize-agnostic: passes INT8 values on between ops in INT8"
NO_FLOATS = "its output is not floating point"
SEVERAL_RESULTS = "it has more than one output"

#: Corrections of weights in 4 bits or less, best first: of layers that multiply, and of tables.
LAYER_CORRECTIONS = (
    (WeightCorrection.AWQ, WeightCorrection.GPTQ),
    (WeightCorrection.GPTQ,),
    (WeightCorrection.AWQ,),
    (),
    (WeightCorrection.HQQ,),
    (WeightCorrection.AWQ, WeightCorrection.GPTQ, WeightCorrection.AUTOROUND),
    (WeightCorrection.GPTQ, WeightCorrection.AUTOROUND),
    (WeightCorrection.AWQ, WeightCorrection.AUTOROUND),
    (WeightCorrection.AUTOROUND,),
)
#: The same for kernels with integer zero points, which the steps of HQQ never reach: they stay
#: below half a step. Learned rounding requires gradients, which their frameworks lack.
ZERO_POINT_CORRECTIONS = tuple(
    given
    for given in LAYER_CORRECTIONS
    if not {WeightCorrection.HQQ, WeightCorrection.AUTOROUND}.intersection(given)
)
TABLE_CORRECTIONS = ((), (WeightCorrection.HQQ,))
#: Weights with more bits are as good rounded to nearest.
_MOST_BITS_CORRECTED = 4
#: The 16-bit precisions; frameworks give a reason for each missing kernel.
SIXTEEN_BITS = tuple(precision for precision in Precision if precision.is_16_bit)


#: Shorter rows would hardly shrink in INT8, as each has a scale of its own.
_MIN_ROW_LENGTH = 8


def is_usable(weight: Array) -> bool:
    """Whether a weight is non-empty and finite, so that it can be rounded."""
    return bool(weight.size and np.isfinite(weight).all())


def find_table_obstacle(table: Array) -> str | None:
    """Return the reason why the rows of a table cannot be stored in INT8; None if they can."""
    if not is_usable(table):
        return UNUSABLE_WEIGHT
    if table.shape[1] >= _MIN_ROW_LENGTH:
        return None
    return f"its rows have fewer than {_MIN_ROW_LENGTH} values, so INT8 would increase its size"


@dataclass(frozen=True)
class IntegerKernel:
    """The integer kernel of an op and the quantization that it supports.

    Attributes:
        weight: quantization of the weight; None for an op without a weight.
        algorithms: calibration algorithms for the op's input, best first.
        weight_alone: weight-only quantization; None if the op does not support it.
        other_weights: further weight quantizations that a plan may request.
        low_bits: weight-only quantizations in groups, best first, or the reason why none has 2 to
            4 bits.
        low_bit_corrections: corrections of these weights, best first; see `QuantSpec`.
    """

    weight: QuantSpec | None = None
    algorithms: tuple[CalibrationAlgorithm, ...] = ()
    weight_alone: QuantSpec | None = None
    other_weights: tuple[QuantSpec, ...] = ()
    low_bits: tuple[QuantSpec, ...] | str = NO_LOW_BIT_KERNEL
    low_bit_corrections: tuple[tuple[WeightCorrection, ...], ...] = ((),)

    def configs(self) -> list[OpConfig]:
        """Return the configs of the op, best first; most differ only in calibration."""
        activations = (
            QuantSpec(QuantDType.UINT8, Scheme.ASYMMETRIC, Granularity.PER_TENSOR, algorithm)
            for algorithm in self.algorithms
        )
        result = [OpConfig(Precision.INT8, self.weight, activation) for activation in activations]
        if self.weight_alone is not None:
            result.append(OpConfig(Precision.INT8, self.weight_alone))
        if not isinstance(self.low_bits, str):
            result += map(
                make_weight_only, iterate_corrected_specs(self.low_bits, self.low_bit_corrections)
            )
        return result


def iterate_corrected_specs(
    specs: Iterable[QuantSpec],
    corrections: Iterable[tuple[WeightCorrection, ...]],
    most_bits: int = _MOST_BITS_CORRECTED,
) -> Iterator[QuantSpec]:
    """Yield quantizations in groups with each of several corrections, in their order.

    With more than `most_bits`, only those without corrections.
    """
    specs = tuple(specs)
    for combination in corrections:
        for spec in specs:
            if not combination or spec.dtype.bits <= most_bits:
                yield replace(spec, corrections=combination)


def table_in_bytes() -> IntegerKernel:
    """Return the INT8 kernel of a lookup table: full range, as nothing is accumulated."""
    return IntegerKernel(weight_alone=weight_quant_spec(Int8Accumulation.EXACT))


@dataclass(frozen=True)
class OpKernels:
    """The kernels of one op, or the reasons for missing kernels.

    Attributes:
        int8: the integer kernel, or the reason for its absence.
        missing: 16-bit precision → the reason for a missing kernel; kernels exist for the others.
        emulated: 16-bit precisions whose kernel computes in FP32 and rounds on any hardware.
        fp32: names of FP32 kernels besides the framework's own; see `FLOAT_KERNELS`.
    """

    int8: IntegerKernel | str = NO_INTEGER_KERNEL
    missing: Mapping[Precision, str] = field(default_factory=dict)
    emulated: frozenset[Precision] = frozenset()
    fp32: tuple[str, ...] = ()

    @classmethod
    def none(cls, reason: str) -> OpKernels:
        """Return no kernels except FP32, with a single reason."""
        return cls(reason, dict.fromkeys(SIXTEEN_BITS, reason))


def build_op_capability(kernels: OpKernels, supports: Mapping[Precision, Support]) -> Capability:
    """Return the capability of an op: precisions with a kernel that the hardware can compute.

    `supports` are the 16-bit precisions → whether the hardware supports them.
    """
    configs: list[OpConfig] = []
    reasons: dict[Precision, str] = {}
    emulated = set()
    other_weights: tuple[QuantSpec, ...] = ()
    # Every CPU computes in INT8, so only 16-bit support depends on the hardware.
    if isinstance(kernels.int8, str):
        reasons |= dict.fromkeys((Precision.INT8, *LOW_BITS), kernels.int8)
    else:
        configs += kernels.int8.configs()
        if not any(config.precision is Precision.INT8 for config in configs):
            reasons[Precision.INT8] = NO_INTEGER_KERNEL
        if isinstance(kernels.int8.low_bits, str):
            reasons |= dict.fromkeys(LOW_BITS, kernels.int8.low_bits)
        other_weights = kernels.int8.other_weights
    for precision, support in supports.items():
        reason = kernels.missing.get(precision) if support.available else support.reason
        if reason is not None:
            reasons[precision] = reason
            continue
        configs.append(OpConfig(precision))
        if precision in kernels.emulated or not support.native:
            emulated.add(precision)
    return Capability((*configs, FP32), reasons, frozenset(emulated), other_weights, kernels.fp32)


def stays_in_fp32(
    layers: Iterable[str], where: str, why: str, precisions: str = "FP32"
) -> tuple[str, ...]:
    """Return one sentence for the user, e.g. `2 LSTM within the op 'a' stay in FP32: …`.

    No sentence without layers, which are given by their types. `precisions` are those in which
    they stay.
    """
    counts = Counter(layers)
    if not counts:
        return ()
    summary = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    verb = "stays" if counts.total() == 1 else "stay"
    return (" ".join(part for part in (summary, where, f"{verb} in {precisions}: {why}") if part),)
