"""From the kernels that a framework has for an op to what the op can run in here, with reasons."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from neural_mp.core.enums import CalibrationAlgorithm, Granularity, QuantDType, Scheme
from neural_mp.core.hardware import Hardware, Support
from neural_mp.core.int8_accumulation import Int8Accumulation, weight_quant_spec
from neural_mp.core.precision import FP32, OpConfig, Precision, QuantSpec
from neural_mp.space import Capability
from neural_mp.util.pytree import Array

#: Why an op has no kernel, in words that all frameworks share.
NO_INTEGER_KERNEL = "no integer kernel"
BOTH_FACTORS_COMPUTED = "both factors are computed; no integer kernel"
COMPUTED_WEIGHT = "its weight is computed, not constant"
UNUSABLE_WEIGHT = "its weight is empty, or holds NaN or Inf"
CONSTANT_INPUT = "what it reads is constant, not computed"
TRANSPOSED_INPUT = "it reads its input transposed, which the integer kernel does not"
RUNS_ALONG = "runs in the INT8 kernel of the layer before it, not by itself"
AGNOSTIC = "moves INT8 values where the ops around it run in INT8, computes nothing itself"
NO_FLOATS = "its result holds no floating-point numbers"
SEVERAL_RESULTS = "it has several results"

#: The precisions of which a framework says why it has no kernel in them.
SIXTEEN_BITS = tuple(precision for precision in Precision if precision.is_16_bit)


#: A row of fewer numbers than these takes about as much in bytes, with a scale of its own.
_MIN_ROW_LENGTH = 8


def is_usable(weight: Array) -> bool:
    """Whether a weight holds numbers that can be rounded."""
    return bool(weight.size and np.isfinite(weight).all())


def table_obstacle(table: Array) -> str | None:
    """Why the rows of a table are not stored in bytes; None if they can be."""
    if not is_usable(table):
        return UNUSABLE_WEIGHT
    return "its rows are so short that it would grow" if table.shape[1] < _MIN_ROW_LENGTH else None


def activation_spec(algorithm: CalibrationAlgorithm) -> QuantSpec:
    """How the integer kernels of all frameworks read a tensor; its range is found so."""
    return QuantSpec(QuantDType.UINT8, Scheme.ASYMMETRIC, Granularity.PER_TENSOR, algorithm)


@dataclass(frozen=True)
class IntegerKernel:
    """An integer kernel that an op has, and how the op may be quantized for it.

    Attributes:
        weight: how the weight is stored; None for an op without a weight.
        algorithms: what may choose the range of what the op reads, best first.
        weight_alone: how the weight is stored where the weight alone is in INT8; None where the op
            cannot run so.
        other_weights: how the weight may be stored beside that, where a plan asks.
    """

    weight: QuantSpec | None = None
    algorithms: tuple[CalibrationAlgorithm, ...] = ()
    weight_alone: QuantSpec | None = None
    other_weights: tuple[QuantSpec, ...] = ()

    def configs(self) -> list[OpConfig]:
        """The INT8 forms of the op, best first; most differ in how the range is chosen only."""
        found = [
            OpConfig(Precision.INT8, self.weight, activation_spec(way)) for way in self.algorithms
        ]
        if self.weight_alone is not None:
            found.append(OpConfig(Precision.INT8, self.weight_alone))
        return found


def table_in_bytes() -> IntegerKernel:
    """The INT8 form of a table whose rows are read; of no products of bytes, so in full range."""
    return IntegerKernel(weight_alone=weight_quant_spec(Int8Accumulation.EXACT))


@dataclass(frozen=True)
class OpKernels:
    """The kernels that a framework has for one op, or why it has none.

    Attributes:
        int8: the integer kernel, or the reason why there is none.
        missing: 16-bit precision → why the framework has no kernel of it; the others it has.
        emulated: 16-bit precisions whose kernel computes in FP32 and rounds, whatever the hardware.
    """

    int8: IntegerKernel | str = NO_INTEGER_KERNEL
    missing: Mapping[Precision, str] = field(default_factory=dict)
    emulated: frozenset[Precision] = frozenset()

    @classmethod
    def none(cls, reason: str) -> OpKernels:
        """No kernels but those of FP32, for one reason."""
        return cls(reason, dict.fromkeys(SIXTEEN_BITS, reason))


def built_capabilities(
    kernels: Mapping[str, OpKernels], hardware: Hardware
) -> dict[str, Capability]:
    """Op → what it can run in: what the framework has a kernel for and the hardware can compute."""
    supports = {precision: hardware.support(precision) for precision in SIXTEEN_BITS}
    return {op: _capability(found, supports) for op, found in kernels.items()}


def _capability(kernels: OpKernels, supports: Mapping[Precision, Support]) -> Capability:
    configs: list[OpConfig] = []
    reasons: dict[Precision, str] = {}
    emulated = set()
    other_weights: tuple[QuantSpec, ...] = ()
    # Every CPU computes in INT8, so that the hardware is asked for the 16 bits only.
    if isinstance(kernels.int8, str):
        reasons[Precision.INT8] = kernels.int8
    else:
        configs += kernels.int8.configs()
        other_weights = kernels.int8.other_weights
    for precision, support in supports.items():
        reason = kernels.missing.get(precision) if support.available else support.reason
        if reason is not None:
            reasons[precision] = reason
            continue
        configs.append(OpConfig(precision))
        if precision in kernels.emulated or not support.native:
            emulated.add(precision)
    return Capability((*configs, FP32), reasons, frozenset(emulated), other_weights)


def stays_in_fp32(layers: Iterable[str], where: str, why: str) -> tuple[str, ...]:
    """One sentence for a user, such as `2 LSTM within the op 'a' stay in FP32: …`.

    Args:
        layers: the type of every layer that stays; none, and nothing is said.
        where: where they are, as it follows their names; may be empty.
        why: why they stay.
    """
    counts = Counter(layers)
    if not counts:
        return ()
    words = ", ".join(f"{count} {kind}" for kind, count in counts.most_common())
    verb = "stays" if counts.total() == 1 else "stay"
    return (" ".join(part for part in (words, where, f"{verb} in FP32: {why}") if part),)
