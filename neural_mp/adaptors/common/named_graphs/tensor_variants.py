"""The dtype variants of a tensor while a graph is converted to the precisions of a plan.

A variant is created once, on first use: one conversion for every tensor and direction, and none
without a consumer.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import ml_dtypes
import numpy as np

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.signatures.signature import Array
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow


def cast_saturating(values: Array, dtype: np.dtype[Any]) -> Array:
    """Cast values to a 16-bit dtype, saturating at its largest finite value.

    Many masks use the lowest float32 in place of minus infinity, which must not become infinite.
    """
    with np.errstate(over="ignore"):
        low = values.astype(dtype)
    lost = np.isfinite(values) & ~np.isfinite(low.astype(np.float32))
    if not lost.any():
        return low
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(lost, np.copysign(largest, values).astype(dtype), low)


#: The variants of a tensor, also used as name suffixes.
FP32, BF16, FP16, UINT8 = "fp32", "bf16", "fp16", "uint8"
VARIANT_OF: Mapping[Precision, str] = {Precision.BF16: BF16, Precision.FP16: FP16}
#: The dtypes of constants.
_NARROW = {BF16: ml_dtypes.bfloat16, FP16: np.float16}
#: A framework's tensor: its name, or an object.
T = TypeVar("T")


class TensorVariants(ABC, Generic[T]):
    """The variants in the converted graph of every tensor of the unconverted graph.

    A tensor without a `set_variant` call exists in FP32, as in the unconverted graph. A framework
    inserts the conversions and counts them.

    Args:
        flow: the quantized tensors of the plan.
        ranges: scale owner (`flow.scale_owner`) → the range that its scale must cover.
    """

    #: The variants that a dequantization can produce.
    dequantized_to: ClassVar[tuple[str, ...]] = (FP32,)

    def __init__(self, flow: QuantizationFlow, ranges: Mapping[str, Range]) -> None:
        self._encodings = {
            tensor: QuantParams.of(ranges[root]) for tensor, root in flow.scale_owner.items()
        }
        self._found: dict[T, dict[str, T]] = {}
        self._counted: Counter[str] = Counter()

    @property
    def counts(self) -> ConversionCounts:
        """The number of inserted conversions."""
        return ConversionCounts(**self._counted)

    def count_conversion(self, conversion: str) -> None:
        """Count an inserted conversion, a field of `ConversionCounts`."""
        self._counted[conversion] += 1

    def get_quant_params(self, tensor: T) -> QuantParams:
        """Return the uint8 quantization parameters of a tensor."""
        return self._encodings[self.name_of(tensor)]

    def find_variants(self, tensor: T) -> dict[str, T]:
        """Return the existing variants of a tensor."""
        return self._found.setdefault(tensor, {FP32: tensor})

    def set_variant(self, tensor: T, variant: str, value: T) -> None:
        """Set a variant as the only one of a tensor."""
        self._found[tensor] = {variant: value}

    def get_computed_result(self, tensor: T) -> tuple[T, QuantParams | None]:
        """Return a tensor as computed, and its quantization parameters if in uint8."""
        variant, value = next(iter(self.find_variants(tensor).items()))
        return value, self.get_quant_params(tensor) if variant == UINT8 else None

    def is_stored(self, tensor: T) -> bool:
        """Whether the uint8 variant of a tensor exists."""
        return UINT8 in self.find_variants(tensor)

    def as_float(self, tensor: T, variant: str = FP32) -> T:
        """Return a tensor in FP32, BF16 or FP16."""
        variants = self.find_variants(tensor)
        if variant not in variants:
            variants[variant] = self._make_variant(tensor, variant, variants)
        return variants[variant]

    def as_uint8(self, tensor: T) -> T:
        """Return a tensor in uint8."""
        variants = self.find_variants(tensor)
        if UINT8 not in variants:
            variants[UINT8] = self.insert_quantize(tensor, self.as_float(tensor))
        return variants[UINT8]

    def _make_variant(self, tensor: T, variant: str, variants: Mapping[str, T]) -> T:
        array = self.get_constant_value(tensor)
        if array is not None:
            return self.insert_16_bit_constant(
                tensor, variant, cast_saturating(array, _NARROW[variant])
            )
        source = next((name for name in (FP32, BF16, FP16) if name in variants), None)
        if source is None and variant in self.dequantized_to:
            return self.insert_dequantize(tensor, variant)
        return self.insert_cast(tensor, source or FP32, variant)

    @abstractmethod
    def name_of(self, tensor: T) -> str:
        """Return the name of a tensor in plans."""

    @abstractmethod
    def get_constant_value(self, tensor: T) -> Array | None:
        """Return the value of a constant; None for a computed tensor."""

    @abstractmethod
    def insert_16_bit_constant(self, tensor: T, variant: str, values: Array) -> T:
        """Insert a 16-bit copy of a constant."""

    @abstractmethod
    def insert_cast(self, tensor: T, source: str, variant: str) -> T:
        """Insert a cast of a tensor from one float variant to another."""

    @abstractmethod
    def insert_quantize(self, tensor: T, real: T) -> T:
        """Insert a quantization of a tensor's FP32 variant."""

    @abstractmethod
    def insert_dequantize(self, tensor: T, variant: str) -> T:
        """Insert a dequantization of a uint8 tensor to one of `dequantized_to`."""
