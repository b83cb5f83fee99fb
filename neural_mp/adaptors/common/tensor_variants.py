"""The forms in which a tensor is there while a graph is written in the precisions of a plan.

A form is made the first time that an op asks for it, and once only: so there is one conversion for
every tensor and direction, and none where no op asks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping
from typing import Any, ClassVar, Generic, TypeVar

import ml_dtypes
import numpy as np

from neural_mp.adaptors.common.quant_params import QuantParams
from neural_mp.adaptors.common.signature import Array
from neural_mp.adaptors.contract import ConversionCounts
from neural_mp.core.observations import Range
from neural_mp.core.precision import Precision
from neural_mp.core.quantization_flow import QuantizationFlow


def cast_saturating(values: Array, dtype: np.dtype[Any]) -> Array:
    """Values in a 16-bit dtype, those beyond its range as the largest that it has.

    The lowest float32 stands for minus infinity in many a mask, but must not become it.
    """
    with np.errstate(over="ignore"):
        low = values.astype(dtype)
    lost = np.isfinite(values) & ~np.isfinite(low.astype(np.float32))
    if not lost.any():
        return low
    largest = float(ml_dtypes.finfo(dtype).max)
    return np.where(lost, np.copysign(largest, values).astype(dtype), low)


#: The forms of a tensor, and what is put behind its name for them.
FP32, BF16, FP16, UINT8 = "fp32", "bf16", "fp16", "uint8"
FORM_OF: Mapping[Precision, str] = {Precision.BF16: BF16, Precision.FP16: FP16}
#: The types that constants are stored in.
_NARROW = {BF16: ml_dtypes.bfloat16, FP16: np.float16}
#: What a framework has for a tensor of a graph: its name, or an object.
T = TypeVar("T")


class TensorVariants(ABC, Generic[T]):
    """Where every tensor of the untouched graph is to be found in the graph being written.

    A tensor that was not `put` here is there in FP32, as in the untouched graph. A framework says
    how conversions are written, and counts them.

    Args:
        flow: what is stored in INT8 under the plan.
        ranges: quantized tensor (`flow.root`) → the range that its scale has to hold.
    """

    #: The forms that a dequantization can write.
    dequantized_to: ClassVar[tuple[str, ...]] = (FP32,)

    def __init__(self, flow: QuantizationFlow, ranges: Mapping[str, Range]) -> None:
        self._encodings = {
            tensor: QuantParams.of(ranges[root]) for tensor, root in flow.scale_owner.items()
        }
        self._found: dict[T, dict[str, T]] = {}
        self._counted: Counter[str] = Counter()

    @property
    def counts(self) -> ConversionCounts:
        """How many conversions were put in."""
        return ConversionCounts(**self._counted)

    def count(self, conversion: str) -> None:
        """Say that one of `ConversionCounts` was put in."""
        self._counted[conversion] += 1

    def encoding_of(self, tensor: T) -> QuantParams:
        """How a tensor is stored in uint8."""
        return self._encodings[self.name_of(tensor)]

    def found(self, tensor: T) -> dict[str, T]:
        """Form → where the tensor is there in it."""
        return self._found.setdefault(tensor, {FP32: tensor})

    def put(self, tensor: T, form: str, value: T) -> None:
        """Say that a tensor is there in a form, and in no other yet."""
        self._found[tensor] = {form: value}

    def result_of(self, tensor: T) -> tuple[T, QuantParams | None]:
        """Where a tensor is as it was computed, and how it is stored if that is in uint8."""
        form, value = next(iter(self.found(tensor).items()))
        return value, self.encoding_of(tensor) if form == UINT8 else None

    def is_stored(self, tensor: T) -> bool:
        """Whether a tensor is there in uint8 already."""
        return UINT8 in self.found(tensor)

    def real(self, tensor: T, form: str = FP32) -> T:
        """A tensor in FP32, BF16 or FP16."""
        found = self.found(tensor)
        if form not in found:
            found[form] = self._made(tensor, form, found)
        return found[form]

    def stored(self, tensor: T) -> T:
        """A tensor in uint8."""
        found = self.found(tensor)
        if UINT8 not in found:
            found[UINT8] = self.quantized(tensor, self.real(tensor))
        return found[UINT8]

    def _made(self, tensor: T, form: str, found: Mapping[str, T]) -> T:
        array = self.value_of(tensor)
        if array is not None:
            return self.constant_in(tensor, form, cast_saturating(array, _NARROW[form]))
        source = next((known for known in (FP32, BF16, FP16) if known in found), None)
        if source is None and form in self.dequantized_to:
            return self.dequantized(tensor, form)
        return self.cast(tensor, source or FP32, form)

    @abstractmethod
    def name_of(self, tensor: T) -> str:
        """What plans call a tensor."""

    @abstractmethod
    def value_of(self, tensor: T) -> Array | None:
        """The value of a constant; None for what is computed."""

    @abstractmethod
    def constant_in(self, tensor: T, form: str, values: Array) -> T:
        """Put in a constant of 16 bits, in the place of another constant."""

    @abstractmethod
    def cast(self, tensor: T, source: str, form: str) -> T:
        """Put in a cast of a tensor, from one form that it is `real` in to another."""

    @abstractmethod
    def quantized(self, tensor: T, real: T) -> T:
        """Put in a quantization with the scale of a tensor, of its FP32 form."""

    @abstractmethod
    def dequantized(self, tensor: T, form: str) -> T:
        """Put in a dequantization of a tensor that is `stored`, to one of `dequantized_to`."""
